/* A GPT's forward pass over rows, as an interpreter of a tape of operations.

   A row is one position of one stream of text. Python records the model's equations as a tape once
   (gpt/sampling/tape.py) and owns all memory: packed weights, caches of keys and values, buffers.
   `forward` takes blocks of rows through the tape. REAL is float, or double for the proof.

   Packed weights: W (n_out, n_in) is cut into panels of PANEL outputs, the last one filled up with
   zeros; a panel is (n_in, PANEL), so that the outputs lie side by side in the vector registers.
   Keys are kept in panels of LANES positions, (width, LANES), so that the scores of neighbours
   lie side by side as well. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL _Pragma("unroll")
#endif

/* ROWS x VECTORS sums stay in registers while one vector of weights serves ROWS rows. */
#if defined(__AVX512F__)
enum { BYTES = 64, VECTORS = 4, ROWS = 6 };
#elif defined(__AVX__)
enum { BYTES = 32, VECTORS = 2, ROWS = 6 };
#elif defined(__aarch64__)
enum { BYTES = 16, VECTORS = 4, ROWS = 6 };
#else
enum { BYTES = 16, VECTORS = 2, ROWS = 4 };
#endif
enum { LANES = BYTES / sizeof(REAL), PANEL = VECTORS * LANES, DOUBLE = sizeof(REAL) == 8 };

typedef __typeof__(__builtin_choose_expr(DOUBLE, (int64_t)0, (int32_t)0)) whole;
/* Vectors in memory are aligned to one number only, and may be viewed as any type. */
typedef REAL vec __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef whole ivec __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef uint32_t pairs __attribute__((vector_size(BYTES), aligned(4), may_alias));

enum { EMBED, LAYER_NORM, RMS_NORM, LINEAR, HEAD_NORM, ROTATE, ATTEND, RELU, RELU2, GELU, GELU_TANH,
       SILU_TIMES };
enum { STREAM, NORMED, WIDE, LOGITS, BUFFERS = LOGITS };

/* What an operation reads and writes; gpt/sampling/tape.py has the same fields. */
typedef struct {
  int64_t kind, source, target; /* source and target: buffers of rows */
  int64_t n_in, n_out;          /* widths; of heads: how many, and how many of keys */
  int64_t width;                /* of one head */
  int64_t add, halved;          /* add to the target; weights are bfloat16, in pairs */
  double number;                /* eps, or a scale */
  const void *weights;          /* packed matrix, table, gamma */
  const REAL *vector;           /* bias, beta, second table; NULL for none */
  REAL *keys, *values;          /* (streams, n_out, panels, width, LANES), (.., context, padded) */
} operation;

typedef struct {
  int64_t n_operations;
  const operation *operations;
  int64_t vocab_size, context;
  int64_t most_rows, stride; /* rows of a block; numbers from a row of a buffer to the next */
  REAL *workspace;           /* BUFFERS * most_rows * stride, and room for the scores of a row */
  REAL *logits;              /* (streams, logits_stride) */
  int64_t logits_stride;
  double *weights; /* vocab_size, for a draw */
} tape;

/* Rows that go through the tape together: several streams at one position, or several positions
   of one stream. Row r is of stream `stream + r * is_streams`. */
typedef struct {
  const int64_t *tokens;
  int64_t n, stream, position, is_streams, wants_logits;
  REAL *logits;
} block;

int64_t panel(void) { return PANEL; }
int64_t lanes(void) { return LANES; }

INLINE vec load(const REAL *from) { return *(const vec *)from; }
INLINE void store(REAL *to, vec x) { *(vec *)to = x; }
INLINE vec filled(REAL x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* e^x = 2^n e^u with n whole and |u| <= ln(2) / 2, e^u by its series. Outside the range of normal
   numbers x is moved to its ends; NaN stays NaN. */
INLINE vec exponential(vec x) {
  const REAL log2e = 1.4426950408889634074, ln2 = 0.69314718055994530942;
  const vec low = filled(DOUBLE ? -708 : -87), high = filled(DOUBLE ? 709 : 88);
  x = choose(x < low, low, choose(x > high, high, x));
  vec t = x * log2e;
  ivec n = __builtin_convertvector(t + choose(t < 0, filled(-0.5), filled(0.5)), ivec);
  vec u = (t - __builtin_convertvector(n, vec)) * ln2, sum = filled(1);
  UNROLL
  for (int k = DOUBLE ? 13 : 7; k > 0; k--) sum = 1 + sum * u * (REAL)(1.0 / k);
  return sum * (vec)((n + (DOUBLE ? 1023 : 127)) << (DOUBLE ? 52 : 23));
}

/* y (+)= x W^T + b for `rows` rows and one panel. Every row is summed in the same order. */
INLINE void tile(const int rows, const int halved, const REAL *x, int64_t x_stride,
                 const void *weights, int64_t n_in, const REAL *bias, int64_t add, REAL *y,
                 int64_t y_stride) {
  vec sum[ROWS][VECTORS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) sum[r][v] = bias ? load(bias + v * LANES) : (vec){0};
  }
  for (int64_t i = 0; i < n_in; i++) {
    vec w[VECTORS];
    if (halved) { /* 32 bits hold output j (low) and output j + PANEL / 2 (high) */
      const pairs *both = (const pairs *)((const uint32_t *)weights + i * (PANEL / 2));
      UNROLL
      for (int v = 0; v < VECTORS / 2; v++) {
        w[v] = (vec)(both[v] << 16);
        w[v + VECTORS / 2] = (vec)(both[v] & 0xffff0000u);
      }
    } else {
      UNROLL
      for (int v = 0; v < VECTORS; v++) w[v] = load((const REAL *)weights + i * PANEL + v * LANES);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
      UNROLL
      for (int v = 0; v < VECTORS; v++) sum[r][v] += w[v] * x[r * x_stride + i];
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      REAL *to = y + r * y_stride + v * LANES;
      if (add) sum[r][v] += load(to);
      store(to, sum[r][v]);
    }
  }
}

INLINE void product(const int halved, int64_t n, const REAL *x, int64_t x_stride,
                    const void *weights, int64_t n_in, int64_t n_out, const REAL *bias,
                    int64_t add, REAL *y, int64_t y_stride) {
  const int64_t size = n_in * PANEL * (halved ? 2 : sizeof(REAL));
  for (int64_t first = 0; first < n_out; first += PANEL) {
    const char *w = (const char *)weights + first / PANEL * size;
    const REAL *b = bias ? bias + first : NULL;
    for (int64_t r = 0; r < n; r += ROWS) {
      const REAL *from = x + r * x_stride;
      REAL *to = y + r * y_stride + first;
#define TILE(rows) tile(rows, halved, from, x_stride, w, n_in, b, add, to, y_stride); break;
      switch (n - r) {
        case 1: TILE(1)
        case 2: TILE(2)
        case 3: TILE(3)
        case 4: TILE(4)
#if defined(__AVX__) || defined(__aarch64__)
        case 5: TILE(5)
#endif
        default: TILE(ROWS)
      }
    }
  }
}

static void linear(const operation *o, int64_t n, const REAL *x, int64_t x_stride, REAL *y,
                   int64_t y_stride) {
  if (o->halved && !DOUBLE)
    product(1, n, x, x_stride, o->weights, o->n_in, o->n_out, o->vector, o->add, y, y_stride);
  else
    product(0, n, x, x_stride, o->weights, o->n_in, o->n_out, o->vector, o->add, y, y_stride);
}

static void embed(const operation *o, const REAL *table, int64_t token, int64_t position, REAL *y) {
  const REAL scale = o->number;
  for (int64_t i = 0; i < o->n_out; i++) y[i] = scale * table[token * o->n_out + i];
  if (o->vector)
    for (int64_t i = 0; i < o->n_out; i++) y[i] += o->vector[position * o->n_out + i];
}

static void layer_norm(const operation *o, const REAL *x, REAL *y) {
  const REAL *gamma = o->weights, *beta = o->vector;
  REAL mean = 0, square = 0;
  for (int64_t i = 0; i < o->n_in; i++) mean += x[i];
  mean /= o->n_in;
  for (int64_t i = 0; i < o->n_in; i++) square += (x[i] - mean) * (x[i] - mean);
  const REAL scale = 1 / (REAL)sqrt(square / o->n_in + o->number);
  for (int64_t i = 0; i < o->n_in; i++) y[i] = (x[i] - mean) * scale * gamma[i] + beta[i];
}

static void rms_norm(const REAL *x, int64_t n, double eps, const REAL *gamma, REAL *y) {
  REAL square = 0;
  for (int64_t i = 0; i < n; i++) square += x[i] * x[i];
  const REAL scale = 1 / (REAL)sqrt(square / n + eps);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * (gamma ? gamma[i] : 1);
}

/* Turn each pair (first half, second half) of every head by the position's angles. */
static void rotate(const operation *o, int64_t position, REAL *heads) {
  const int64_t half = o->width / 2;
  const REAL *cosine = (const REAL *)o->weights + position * half;
  const REAL *sine = o->vector + position * half;
  for (int64_t h = 0; h < o->n_in; h++, heads += o->width)
    for (int64_t i = 0; i < half; i++) {
      REAL a = heads[i], b = heads[i + half];
      heads[i] = a * cosine[i] - b * sine[i];
      heads[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* q k^T for one panel of keys; four sums, as one would wait for itself. */
static void score(const REAL *query, int64_t width, const REAL *keys, REAL *y) {
  vec sum[4] = {{0}, {0}, {0}, {0}};
  int64_t i = 0;
  for (; i + 3 < width; i += 4) {
    UNROLL
    for (int k = 0; k < 4; k++) sum[k] += query[i + k] * load(keys + (i + k) * LANES);
  }
  for (; i < width; i++) sum[0] += query[i] * load(keys + i * LANES);
  store(y, (sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* In place: e^((score - largest) / sqrt(width)) of n scores, filled up to whole vectors with
   almost nothing; returns 1 / sum. */
static REAL weigh(REAL *scores, int64_t n, REAL scale) {
  for (int64_t i = n; i % LANES; i++) scores[i] = -INFINITY;
  vec most = load(scores), sum = {0};
  for (int64_t i = LANES; i < n; i += LANES) {
    vec x = load(scores + i);
    most = choose(x > most, x, most);
  }
  REAL largest = most[0], total = 0;
  for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
  for (int64_t i = 0; i < n; i += LANES) {
    vec x = exponential((load(scores + i) - largest) * scale);
    store(scores + i, x);
    sum += x;
  }
  for (int i = 0; i < LANES; i++) total += sum[i];
  return 1 / total;
}

/* sum_p weights[p] values[p], for `count` vectors of a row of values; two positions at a time,
   as one sum would wait for itself. */
INLINE void mix(const int count, const REAL *weights, int64_t n, const REAL *values, int64_t stride,
                REAL scale, REAL *y) {
  vec even[4], odd[4];
  UNROLL
  for (int v = 0; v < count; v++) even[v] = odd[v] = (vec){0};
  int64_t p = 0;
  for (; p + 1 < n; p += 2, values += 2 * stride) {
    UNROLL
    for (int v = 0; v < count; v++) {
      even[v] += weights[p] * load(values + v * LANES);
      odd[v] += weights[p + 1] * load(values + stride + v * LANES);
    }
  }
  UNROLL
  for (int v = 0; v < count; v++) {
    if (p < n) even[v] += weights[p] * load(values + v * LANES);
    store(y + v * LANES, (even[v] + odd[v]) * scale);
  }
}

/* Keep the row's keys and values, then let each of its queries gather from what is kept. */
static void attend(const operation *o, int64_t context, int64_t stream, int64_t position,
                   const REAL *queries, REAL *y, REAL *scores) {
  const int64_t d = o->width, n = position + 1, shared_by = o->n_in / o->n_out;
  const int64_t padded = (d + LANES - 1) / LANES * LANES;
  const int64_t positions = (context + LANES - 1) / LANES * LANES;
  const REAL *new_keys = queries + o->n_in * d, *new_values = new_keys + o->n_out * d;
  const REAL scale = 1 / sqrt((double)d);
  REAL *mixed = scores + positions;
  for (int64_t h = 0; h < o->n_out; h++) {
    REAL *keys = o->keys + (stream * o->n_out + h) * positions * d;
    REAL *values = o->values + (stream * o->n_out + h) * context * padded;
    REAL *slot = keys + position / LANES * LANES * d + position % LANES;
    for (int64_t i = 0; i < d; i++) slot[i * LANES] = new_keys[h * d + i];
    memcpy(values + position * padded, new_values + h * d, d * sizeof(REAL));
    for (int64_t q = h * shared_by; q < (h + 1) * shared_by; q++) {
      const REAL *query = queries + q * d;
      int64_t i = 0;
      for (; i < n; i += LANES) score(query, d, keys + i * d, scores + i);
      const REAL total = weigh(scores, n, scale);
      for (i = 0; i + 4 * LANES <= padded; i += 4 * LANES)
        mix(4, scores, n, values + i, padded, total, mixed + i);
      for (; i + 2 * LANES <= padded; i += 2 * LANES)
        mix(2, scores, n, values + i, padded, total, mixed + i);
      for (; i < padded; i += LANES) mix(1, scores, n, values + i, padded, total, mixed + i);
      memcpy(y + q * d, mixed, d * sizeof(REAL));
    }
  }
}

/* In place, over n numbers and what fills the last vector up. */
static void activate(int64_t kind, int64_t n, REAL *x) {
  const REAL slope = 2 * 0.79788456080286535588; /* 2 sqrt(2 / pi) */
  for (int64_t i = 0; i < n; i += LANES) {
    vec a = load(x + i);
    if (kind == RELU || kind == RELU2) a = choose(a < 0, (vec){0}, a);
    if (kind == RELU2) a *= a;
    if (kind == GELU)
      for (int j = 0; j < LANES; j++)
        a[j] *= (REAL)0.5 * (1 + (DOUBLE ? erf(a[j] * M_SQRT1_2) : erff(a[j] * (REAL)M_SQRT1_2)));
    if (kind == GELU_TANH) /* 0.5 (1 + tanh(z)) = 1 / (1 + e^(-2 z)) */
      a = a / (1 + exponential(-slope * (a + (REAL)0.044715 * a * a * a)));
    if (kind == SILU_TIMES) a = a / (1 + exponential(-a)) * load(x + n + i);
    store(x + i, a);
  }
}

static void through(const tape *t, const block *b) {
  REAL *buffers[BUFFERS], *scores = t->workspace + BUFFERS * t->most_rows * t->stride;
  for (int i = 0; i < BUFFERS; i++) buffers[i] = t->workspace + i * t->most_rows * t->stride;
  for (const operation *o = t->operations; o < t->operations + t->n_operations; o++) {
    if (o->kind == LINEAR) {
      const REAL *x = buffers[o->source];
      if (o->target != LOGITS)
        linear(o, b->n, x, t->stride, buffers[o->target], t->stride);
      else if (b->wants_logits) { /* of the last position only */
        const int64_t first = b->is_streams ? 0 : b->n - 1;
        linear(o, b->n - first, x + first * t->stride, t->stride,
               b->logits, t->logits_stride);
      }
      continue;
    }
    for (int64_t r = 0; r < b->n; r++) {
      const int64_t stream = b->stream + (b->is_streams ? r : 0);
      const int64_t position = b->position + (b->is_streams ? 0 : r);
      const REAL *x = buffers[o->source] + r * t->stride;
      REAL *y = buffers[o->target] + r * t->stride;
      switch (o->kind) {
        case EMBED: embed(o, o->weights, b->tokens[r], position, y); break;
        case LAYER_NORM: layer_norm(o, x, y); break;
        case RMS_NORM: rms_norm(x, o->n_in, o->number, o->weights, y); break;
        case HEAD_NORM:
          for (int64_t h = 0; h < o->n_in; h++)
            rms_norm(x + h * o->width, o->width, o->number, NULL, y + h * o->width);
          break;
        case ROTATE: rotate(o, position, y); break;
        case ATTEND: attend(o, t->context, stream, position, x, y, scores); break;
        default: activate(o->kind, o->n_in, y);
      }
    }
  }
}

/* Read T new tokens of each of `count` streams from `first` on, tokens (count, T), that stand at
   `start` and after it. Leaves logits (count, vocab_size) of the last ones. Returns -1, and does
   nothing, for what does not fit. */
int64_t forward(const tape *t, const int64_t *tokens, int64_t first, int64_t count, int64_t T,
                int64_t start) {
  if (start < 0 || T < 1 || start + T > t->context) return -1;
  for (int64_t i = 0; i < count * T; i++)
    if (tokens[i] < 0 || tokens[i] >= t->vocab_size) return -1;
  /* One position of each stream: blocks of streams. Several: a stream at a time, in blocks. */
  const int64_t streams = T == 1 ? t->most_rows : 1;
  for (int64_t s = 0; s < count; s += streams)
    for (int64_t i = 0; i < T; i += t->most_rows) {
      const int64_t left = T == 1 ? count - s : T - i;
      const int64_t n = left < t->most_rows ? left : t->most_rows;
      const block rows = {tokens + s * T + i, n, first + s, start + i, T == 1, i + n >= T,
                          t->logits + s * t->logits_stride};
      through(t, &rows);
    }
  return 0;
}

/* The first id whose cumulated softmax(logits / temperature) exceeds `uniform`; temperature 0 is
   the limit, the largest. As gpt/sampling/filters.py computes it. Returns -1 for logits that are
   not finite. */
static int64_t draw(const tape *t, const REAL *logits, double temperature, double uniform) {
  const int64_t n = t->vocab_size;
  double *cumulated = t->weights, total = 0;
  int64_t best = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  if (temperature == 0) return best;
  for (int64_t i = 0; i < n; i++) {
    const double below = (double)logits[i] - (double)logits[best];
    cumulated[i] = total += exp(below / temperature);
  }
  const double point = uniform * total;
  for (int64_t i = 0; i < n; i++)
    if (cumulated[i] > point) return i;
  return best;
}

/* Read tokens (count, T) as `forward` does, draw an id for each stream, read those, and so on,
   `steps` times: ids (steps, count), from uniform numbers (count, steps). Returns the steps done:
   fewer where logits are not finite, -1 for what does not fit. */
int64_t write_on(const tape *t, const int64_t *tokens, int64_t first, int64_t count, int64_t T,
                 int64_t start, int64_t steps, double temperature, const double *uniforms,
                 int64_t *ids) {
  for (int64_t step = 0; step < steps; step++) {
    if (forward(t, tokens, first, count, T, start)) return -1;
    for (int64_t s = 0; s < count; s++) {
      const REAL *logits = t->logits + s * t->logits_stride;
      ids[s] = draw(t, logits, temperature, uniforms[s * steps + step]);
      if (ids[s] < 0) return step;
    }
    start += T;
    T = 1;
    tokens = ids;
    ids += count;
  }
  return steps;
}
