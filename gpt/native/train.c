// Kernels of a training step: causal attention, norms and activations, forward and backward.
//
// Each function is one autograd node of gpt/training/kernels.py, where its mathematics stands. The
// tensors are contiguous and their last axis is the fastest; `half` says that activations are
// bfloat16, else they are float. All sums are in float; so is everything else, except that
// attention rounds the factors of its products to bfloat16 where `half` is set and the processor
// multiplies pairs of them. Work is split over OpenMP threads by rows or heads, and no sum crosses
// threads, so results do not depend on the number of threads.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { WIDTH = 16, TILE = 4 };  // floats in a vector register; vectors side by side in a product
#elif defined(__AVX__)
enum { WIDTH = 8, TILE = 2 };
#else
enum { WIDTH = 4, TILE = 2 };
#endif
enum { ROWS = 6 };  // rows of a product kept in registers

typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
#define ALWAYS static inline __attribute__((always_inline))

// ---------------------------------------------------------------- numbers

ALWAYS float from_half(uint16_t bits) {
    union { uint32_t i; float f; } u = {(uint32_t)bits << 16};
    return u.f;
}

ALWAYS uint16_t to_half(float x) {  // to the nearest, ties to even; NaN stays NaN
    union { float f; uint32_t i; } u = {x};
    uint32_t rounded = (u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16;
    return (u.i & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

// Keeps a sum as it is written: the flags allow reordering, which would undo a split constant.
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
#define AS_WRITTEN(x) __builtin_assoc_barrier(x)
#elif __has_builtin(__arithmetic_fence)
#define AS_WRITTEN(x) __arithmetic_fence(x)
#endif
#endif
#ifndef AS_WRITTEN
#define AS_WRITTEN(x) (x)
#endif

ALWAYS float exp_(float x) {  // 2^n e^r, |r| <= ln(2) / 2, e^r by its series; NaN stays NaN
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = AS_WRITTEN(x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}

static void load(float *to, const void *from, long start, long n, int half) {
    if (half)
        for (long i = 0; i < n; i++) to[i] = from_half(((const uint16_t *)from)[start + i]);
    else
        memcpy(to, (const float *)from + start, n * sizeof(float));
}

static void store(void *to, long start, const float *from, long n, int half) {
    if (half)
        for (long i = 0; i < n; i++) ((uint16_t *)to)[start + i] = to_half(from[i]);
    else
        memcpy((float *)to + start, from, n * sizeof(float));
}

// ---------------------------------------------------------------- small matrix products

// The factors of a product are words of 32 bits along the axis that is summed over: one float each,
// or, where `per_word` is 2, two bfloat16 numbers that follow each other, the first in the lower
// half (the layout of VNNI instructions).

#ifdef __AVX512BF16__
enum { PER_WORD = 2 };  // the most numbers in a word

ALWAYS vec plus_product(vec sum, float a, vec b, int per_word) {  // vdpbf16ps: denormals count as 0
    if (per_word == 1) return sum + a * b;
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
}

// The words of n numbers that follow each other in memory, n a multiple of WIDTH, written to `to`,
// which may be x; x itself where a word is one number.
static float *pack(float *to, float *x, long n, int per_word) {
    if (per_word == 1) return x;
    for (long i = 0; i < n; i += WIDTH) {
        __m256bh halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
        _mm256_storeu_si256((__m256i *)(to + i / 2), (__m256i)halves);
    }
    return to;
}

// The words of numbers that stand one above the other, in two rows; a last odd row has zeros below.
// `stride` is from row to row, of numbers and of words. Nothing is done where a word is one number.
static void stack(float *to, const float *x, long rows, long n, long stride, int per_word) {
    if (per_word == 1) return;
    for (long r = 0; r < rows; r += 2)
        for (long i = 0; i < n; i += WIDTH) {
            __m512 upper = _mm512_loadu_ps(x + r * stride + i), lower = _mm512_setzero_ps();
            if (r + 1 < rows) lower = _mm512_loadu_ps(x + (r + 1) * stride + i);
            __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(upper));
            __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(lower));
            __m512i words = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
            _mm512_storeu_si512(to + r / 2 * stride + i, words);
        }
}
#else
enum { PER_WORD = 1 };
ALWAYS vec plus_product(vec sum, float a, vec b, int per_word) { return sum + a * b; }
static float *pack(float *to, float *x, long n, int per_word) { return x; }
static void stack(float *to, const float *x, long rows, long n, long stride, int per_word) {}
#endif

_Static_assert(ROWS % PER_WORD == 0 && WIDTH % PER_WORD == 0, "tiles begin with a whole word");

static long words(long numbers, int per_word) { return (numbers + per_word - 1) / per_word; }

// C (+)= A B for a tile of `rows` x `vecs` vectors, K words. A[m][k] is at a[m * a_m + k * a_k], so
// that a transposed A costs nothing; rows of B and C are b_k and c_m apart.
ALWAYS void tile(int per_word, int rows, int vecs, long K, const float *a, long a_m, long a_k,
                 const float *b, long b_k, float *c, long c_m, int add) {
    vec sum[ROWS][TILE];
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vecs; n++)
            sum[m][n] = add ? *(vec *)(c + m * c_m + n * WIDTH) : (vec){0};
    for (long k = 0; k < K; k++, a += a_k, b += b_k) {
        vec w[TILE];
        for (int n = 0; n < vecs; n++) w[n] = *(const vec *)(b + n * WIDTH);
        for (int m = 0; m < rows; m++)
            for (int n = 0; n < vecs; n++)
                sum[m][n] = plus_product(sum[m][n], a[m * a_m], w[n], per_word);
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < vecs; n++) *(vec *)(c + m * c_m + n * WIDTH) = sum[m][n];
}

#define ARGUMENTS K, a, a_m, a_k, b, b_k, c, c_m, add
#define ROW_CASES(vecs)                                           \
    switch (rows) {                                               \
    case 6: tile(per_word, 6, vecs, ARGUMENTS); break;            \
    case 5: tile(per_word, 5, vecs, ARGUMENTS); break;            \
    case 4: tile(per_word, 4, vecs, ARGUMENTS); break;            \
    case 3: tile(per_word, 3, vecs, ARGUMENTS); break;            \
    case 2: tile(per_word, 2, vecs, ARGUMENTS); break;            \
    case 1: tile(per_word, 1, vecs, ARGUMENTS); break;            \
    }

ALWAYS void product_of(int per_word, int rows, long N, long K, const float *a, long a_m, long a_k,
                       const float *b, long b_k, float *c, long c_m, int add) {
    long n = N / WIDTH;
    for (; n >= TILE; n -= TILE, b += TILE * WIDTH, c += TILE * WIDTH) ROW_CASES(TILE)
    for (; n >= 2; n -= 2, b += 2 * WIDTH, c += 2 * WIDTH) ROW_CASES(2)
    for (; n > 0; n--, b += WIDTH, c += WIDTH) ROW_CASES(1)
}

// At most ROWS rows, N columns, a multiple of WIDTH; sums over K words.
static void product(int per_word, int rows, long N, long K, const float *a, long a_m, long a_k,
                    const float *b, long b_k, float *c, long c_m, int add) {
    if (per_word == 1)
        product_of(1, rows, N, ARGUMENTS);
    else
        product_of(PER_WORD, rows, N, ARGUMENTS);
}

// ---------------------------------------------------------------- attention

typedef struct {
    long B, T, n_heads, n_kv_heads, d_k;
    const float *cos, *sin;  // (T, d_k / 2) each, or null: no rotation
    int qk_norm, half;
    float eps, dropout;
    uint32_t seed;  // of the dropped weights
} Shape;

// Where d_k numbers begin in (B, T, heads, d_k).
static long place(const Shape *s, long b, long t, long head, long heads) {
    return ((b * s->T + t) * heads + head) * s->d_k;
}

static long all_heads(const Shape *s) { return s->n_heads + 2 * s->n_kv_heads; }
static long padded(long n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }
static long least(long a, long b) { return a < b ? a : b; }

static float inverse_rms(const float *x, long n, float eps) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / n + eps);
}

static void turn(float *x, const Shape *s, long t, float direction) {
    long half = s->d_k / 2;
    float *a = x, *b = x + half;
    const float *cos = s->cos + t * half, *sin = s->sin + t * half;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float first = a[i], second = b[i], sine = direction * sin[i];
        a[i] = first * cos[i] - second * sine;
        b[i] = second * cos[i] + first * sine;
    }
}

// Asks for a row early: those of a head lie too far apart for the processor to foresee.
static void fetch(const void *x, long b, long t, long head, long heads, const Shape *s) {
    if (t >= s->T) return;
    long size = s->half ? 2 : 4;
    const char *row = (const char *)x + place(s, b, t, head, heads) * size;
    for (long byte = 0; byte < s->d_k * size; byte += 64) __builtin_prefetch(row + byte);
}
enum { EARLY = 16 };  // rows

// Rows t of one head, from (B, T, heads, d_k) to (T, padded d_k), zeros behind.
static void gather(float *to, const void *from, long b, long head, long heads, const Shape *s) {
    long width = padded(s->d_k);
    for (long t = 0; t < s->T; t++) {
        fetch(from, b, t + EARLY, head, heads, s);
        load(to + t * width, from, place(s, b, t, head, heads), s->d_k, s->half);
        memset(to + t * width + s->d_k, 0, (width - s->d_k) * sizeof(float));
    }
}

// gather, then norm and rotation: what queries and keys go through.
static void gather_turned(float *to, const void *from, long b, long head, const Shape *s,
                          float scale) {
    long width = padded(s->d_k);
    gather(to, from, b, head, all_heads(s), s);
    for (long t = 0; t < s->T; t++) {
        float *row = to + t * width;
        float factor = scale * (s->qk_norm ? inverse_rms(row, s->d_k, s->eps) : 1.0f);
        for (long i = 0; i < s->d_k; i++) row[i] *= factor;
        if (s->cos) turn(row, s, t, 1.0f);
    }
}

// The way back: the gradient of a turned head to the gradient of the projection.
static void scatter_turned(void *to, const void *from, float *gradient, long b, long head,
                           const Shape *s, float scale, float *x) {
    long width = padded(s->d_k);
    for (long t = 0; t < s->T; t++) {
        float *g = gradient + t * width;
        fetch(to, b, t + EARLY, head, all_heads(s), s);
        long start = place(s, b, t, head, all_heads(s));
        for (long i = 0; i < s->d_k; i++) g[i] *= scale;
        if (s->cos) turn(g, s, t, -1.0f);
        if (s->qk_norm) {
            load(x, from, start, s->d_k, s->half);
            float factor = inverse_rms(x, s->d_k, s->eps), along = 0;
            for (long i = 0; i < s->d_k; i++) along += g[i] * x[i];
            along *= factor * factor / s->d_k;
            for (long i = 0; i < s->d_k; i++) g[i] = factor * (g[i] - along * x[i]);
        }
        store(to, start, g, s->d_k, s->half);
    }
}

// (T, width) to (width, padded T), zeros behind.
static void transpose(float *to, const float *from, long T, long width) {
    long across = padded(T);
    for (long t = 0; t < T; t++)
        for (long i = 0; i < width; i++) to[i * across + t] = from[t * width + i];
    for (long i = 0; i < width; i++)
        for (long t = T; t < across; t++) to[i * across + t] = 0;
}

// Promises the compiler that n is a multiple of WIDTH, so that it writes no loop for a rest.
#define WHOLE(n) \
    if ((n) % WIDTH) __builtin_unreachable()

// In place: row i of scores to probabilities of the keys 0 .. i, zeros up to n.
static void softmax(float *p, int i, int n) {
    float most = -INFINITY, sum = 0;
    WHOLE(n);
#pragma omp simd reduction(max : most)
    for (int j = 0; j < n; j++) {
        p[j] = j <= i ? p[j] : -INFINITY;
        most = p[j] > most ? p[j] : most;
    }
    for (int j = 0; j < n; j++) {
        p[j] = j <= i ? exp_(p[j] - most) : 0;
        sum += p[j];
    }
    float factor = 1.0f / sum;
    for (int j = 0; j < n; j++) p[j] *= factor;
}

// In place: the gradient of probabilities p to that of their scores.
static void softmax_backward(float *g, const float *p, int n) {
    float along = 0;
    WHOLE(n);
    for (int j = 0; j < n; j++) along += p[j] * g[j];
    for (int j = 0; j < n; j++) g[j] = p[j] * (g[j] - along);
}

ALWAYS uint32_t hash(uint32_t x) {  // every bit of x moves half the bits of the result
    x = (x ^ (x >> 16)) * 0x7feb352dU;
    x = (x ^ (x >> 15)) * 0x846ca68bU;
    return x ^ (x >> 16);
}

// Dropout of n numbers, the same whenever it is asked for with this seed.
static void drop(float *x, long n, float dropout, uint32_t seed) {
    uint32_t least_kept = dropout * 4294967296.0;
    float scale = 1 / (1 - dropout);
    for (long j = 0; j < n; j++) x[j] = hash(seed + (uint32_t)j) >= least_kept ? x[j] * scale : 0;
}

// Of the weights of one query.
static void drop_weights(float *p, long n, const Shape *s, long query) {
    if (s->dropout) drop(p, n, s->dropout, hash(s->seed ^ hash(query)));
}

static float *numbers(long n) { return aligned_alloc(64, (n * sizeof(float) / 64 + 1) * 64); }

// joined (B, T, n_heads + 2 n_kv_heads, d_k) -> out (B, T, n_heads, d_k). Returns 0, or 1 where
// memory is short.
int attention_forward(const void *joined, void *out, const Shape *s) {
    long T = s->T, width = padded(s->d_k), across = padded(T), shared = s->n_heads / s->n_kv_heads;
    int failed = 0, per_word = s->half ? PER_WORD : 1;
    long wide = width / per_word, d_k = words(s->d_k, per_word);  // words in a packed row
#pragma omp parallel
    {
        float *q = numbers((3 * T + ROWS) * width + (width + ROWS) * across);
        float *k = q + T * width, *v = k + T * width, *o = v + T * width;
        float *kT = o + ROWS * width, *p = kT + width * across;
        if (!q) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long pair = 0; pair < s->B * s->n_kv_heads; pair++) {
            if (!q) continue;
            long b = pair / s->n_kv_heads, group = pair % s->n_kv_heads;
            gather_turned(k, joined, b, s->n_heads + group, s, 1.0f);
            gather(v, joined, b, s->n_heads + s->n_kv_heads + group, all_heads(s), s);
            transpose(kT, pack(k, k, T * width, per_word), T, wide);
            stack(v, v, T, width, width, per_word);
            for (long head = group * shared; head < (group + 1) * shared; head++) {
                gather_turned(q, joined, b, head, s, 1.0f / sqrtf(s->d_k));
                pack(q, q, T * width, per_word);
                for (long i = 0; i < T; i += ROWS) {
                    long rows = least(ROWS, T - i), n = padded(i + rows);
                    for (long r = 0; r < rows; r++) fetch(out, b, i + r, head, s->n_heads, s);
                    product(per_word, rows, n, d_k, q + i * wide, wide, 1, kT, across, p, across,
                            0);
                    for (long r = 0; r < rows; r++) {
                        float *pr = p + r * across;
                        softmax(pr, i + r, n);
                        drop_weights(pr, n, s, (b * s->n_heads + head) * T + i + r);
                        pack(pr, pr, n, per_word);
                    }
                    product(per_word, rows, width, words(i + rows, per_word), p, across, 1, v,
                            width, o, width, 0);
                    for (long r = 0; r < rows; r++) {
                        long start = place(s, b, i + r, head, s->n_heads);
                        store(out, start, o + r * width, s->d_k, s->half);
                    }
                }
            }
        }
        free(q);
    }
    return failed;
}

// The gradient of joined, from that of out; everything in between is computed again.
int attention_backward(const void *joined, const void *g_out, void *g_joined, const Shape *s) {
    long T = s->T, width = padded(s->d_k), across = padded(T), shared = s->n_heads / s->n_kv_heads;
    float scale = 1.0f / sqrtf(s->d_k);
    int failed = 0, per_word = s->half ? PER_WORD : 1;
    long wide = width / per_word, d_k = words(s->d_k, per_word);  // words in a packed row
#pragma omp parallel
    {
        long matrix = T * width, turned = width * across;
        long weights = words(T, per_word) * across, of_tile = ROWS * across;
        float *q = numbers(9 * matrix + 2 * turned + 2 * weights + 2 * of_tile + width);
        float *k = q + matrix, *v = k + matrix, *g_o = v + matrix, *g_q = g_o + matrix;
        float *g_k = g_q + matrix, *g_v = g_k + matrix;
        float *q_packed = g_v + matrix, *g_o_packed = q_packed + matrix;
        float *kT = g_o_packed + matrix, *vT = kT + turned, *p = vT + turned, *g_p = p + weights;
        float *p_tile = g_p + weights, *g_p_tile = p_tile + of_tile, *x = g_p_tile + of_tile;
        if (!q) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long pair = 0; pair < s->B * s->n_kv_heads; pair++) {
            if (!q) continue;
            long b = pair / s->n_kv_heads, group = pair % s->n_kv_heads;
            long v_head = s->n_heads + s->n_kv_heads + group;
            gather_turned(k, joined, b, s->n_heads + group, s, 1.0f);
            gather(v, joined, b, v_head, all_heads(s), s);
            transpose(kT, pack(q, k, matrix, per_word), T, wide);  // q is free here
            transpose(vT, pack(v, v, matrix, per_word), T, wide);
            stack(k, k, T, width, width, per_word);
            memset(g_k, 0, 2 * matrix * sizeof(float));
            for (long head = group * shared; head < (group + 1) * shared; head++) {
                gather_turned(q, joined, b, head, s, scale);
                gather(g_o, g_out, b, head, s->n_heads, s);
                const float *q_rows = pack(q_packed, q, matrix, per_word);
                const float *g_o_rows = pack(g_o_packed, g_o, matrix, per_word);
                stack(q, q, T, width, width, per_word);
                stack(g_o, g_o, T, width, width, per_word);
                for (long i = 0; i < T; i += ROWS) {
                    long rows = least(ROWS, T - i), n = padded(i + rows);
                    float *p_words = p + i / per_word * across, *pi = p_tile;
                    float *g_p_words = g_p + i / per_word * across, *gi = g_p_tile;
                    if (per_word == 1) pi = p_words, gi = g_p_words;
                    product(per_word, rows, n, d_k, q_rows + i * wide, wide, 1, kT, across, pi,
                            across, 0);
                    product(per_word, rows, n, d_k, g_o_rows + i * wide, wide, 1, vT, across, gi,
                            across, 0);
                    for (long r = 0; r < rows; r++) {
                        float *pr = pi + r * across, *gr = gi + r * across;
                        long query = (b * s->n_heads + head) * T + i + r;
                        softmax(pr, i + r, n);
                        drop_weights(gr, n, s, query);
                        softmax_backward(gr, pr, n);
                        drop_weights(pr, n, s, query);
                    }
                    stack(p_words, pi, rows, n, across, per_word);
                    stack(g_p_words, gi, rows, n, across, per_word);
                    for (long r = 0; r < rows; r++)
                        pack(gi + r * across, gi + r * across, n, per_word);
                    product(per_word, rows, width, words(i + rows, per_word), gi, across, 1, k,
                            width, g_q + i * width, width, 0);
                }
                for (long j = 0; j < T; j += ROWS) {  // keys j .. are seen by the queries j ..
                    long rows = least(ROWS, T - j), n = words(T - j, per_word), row = j * width;
                    long weight = j / per_word * across + j, query = row / per_word;
                    product(per_word, rows, width, n, p + weight, 1, across, g_o + query, width,
                            g_v + row, width, 1);
                    product(per_word, rows, width, n, g_p + weight, 1, across, q + query, width,
                            g_k + row, width, 1);
                }
                scatter_turned(g_joined, joined, g_q, b, head, s, scale, x);
            }
            scatter_turned(g_joined, joined, g_k, b, s->n_heads + group, s, 1.0f, x);
            for (long t = 0; t < T; t++)
                store(g_joined, place(s, b, t, v_head, all_heads(s)), g_v + t * width, s->d_k,
                      s->half);
        }
        free(q);
    }
    return failed;
}

// ---------------------------------------------------------------- activations

// In place on n numbers: a = activation(a), and with a gradient a = g activation'(a).
typedef void Map(float *a, const float *g, long n);

static void relu2(float *a, const float *g, long n) {
    if (g)
        for (long i = 0; i < n; i++) a[i] = g[i] * 2 * (a[i] < 0 ? 0 : a[i]);
    else
        for (long i = 0; i < n; i++) a[i] *= a[i] < 0 ? 0 : a[i];
}

// e^-2u, u = sqrt(2 / pi) (x + 0.044715 x^3), with an exponent of at most `most`.
ALWAYS float gelu_exp(float x, float most) {
    float exponent = -1.5957691216f * (x + 0.044715f * x * x * x);
    return exp_(exponent > most ? most : exponent);
}

// The gate (1 + tanh(u)) / 2 is 1 / (1 + e^-2u), which keeps its precision where it is small. The
// bound of 50 keeps the products of the gradient from overflowing, in whatever order.
static void gelu_tanh(float *a, const float *g, long n) {
    if (g)
        for (long i = 0; i < n; i++) {
            float x = a[i], e = gelu_exp(x, 50), gate = 1 / (1 + e);
            a[i] = g[i] * gate * (1 + x * e * gate * 1.5957691216f * (1 + 0.134145f * x * x));
        }
    else
        for (long i = 0; i < n; i++) a[i] /= 1 + gelu_exp(a[i], 87);
}

enum { BLOCK = 512 };

static void each(Map *map, const void *x, const void *g, void *y, long n, int half) {
#pragma omp parallel for schedule(static)
    for (long start = 0; start < n; start += BLOCK) {
        long count = least(BLOCK, n - start);
        float a[BLOCK], b[BLOCK];
        load(a, x, start, count, half);
        if (g) load(b, g, start, count, half);
        map(a, g ? b : 0, count);
        store(y, start, a, count, half);
    }
}

void relu2_forward(const void *x, void *y, long n, int half) { each(relu2, x, 0, y, n, half); }
void relu2_backward(const void *x, const void *g, void *g_x, long n, int half) {
    each(relu2, x, g, g_x, n, half);
}
void gelu_tanh_forward(const void *x, void *y, long n, int half) {
    each(gelu_tanh, x, 0, y, n, half);
}
void gelu_tanh_backward(const void *x, const void *g, void *g_x, long n, int half) {
    each(gelu_tanh, x, g, g_x, n, half);
}

// y = x with dropout; also the gradient of x from that of y.
void dropout(const void *x, void *y, long n, float dropout, uint32_t seed, int half) {
#pragma omp parallel for schedule(static)
    for (long start = 0; start < n; start += BLOCK) {
        long count = least(BLOCK, n - start);
        float a[BLOCK];
        load(a, x, start, count, half);
        drop(a, count, dropout, hash(seed ^ hash(start)));
        store(y, start, a, count, half);
    }
}

// ---------------------------------------------------------------- norms

// Mean (0 for rms) and 1 / sqrt(mean square + eps) of a row.
ALWAYS void moments(const float *x, long d, int centred, float eps, float *mean, float *factor) {
    float sum = 0, squares = 0;
    if (centred)
        for (long i = 0; i < d; i++) sum += x[i];
    float m = sum / d;
    for (long i = 0; i < d; i++) squares += (x[i] - m) * (x[i] - m);
    *mean = m;
    *factor = 1 / sqrtf(squares / d + eps);
}

// y = gamma (x - mean) factor + beta; without beta it is the root-mean-square norm.
void norm_forward(const float *x, const float *gamma, const float *beta, void *y, long rows, long d,
                  float eps, int half) {
#pragma omp parallel
    {
        float row[d];
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            const float *one = x + r * d;
            float mean, factor;
            moments(one, d, beta != 0, eps, &mean, &factor);
            if (beta)
                for (long i = 0; i < d; i++)
                    row[i] = gamma[i] * ((one[i] - mean) * factor) + beta[i];
            else
                for (long i = 0; i < d; i++) row[i] = gamma[i] * (one[i] * factor);
            store(y, r * d, row, d, half);
        }
    }
}

enum { PARTS = 16 };  // rows are summed in so many equal parts, whatever the number of threads

// g_gamma is (d), or (2, d) to hold g_beta too.
int norm_backward(const float *x, const float *gamma, const void *g, float *g_x, float *g_gamma,
                  int centred, long rows, long d, float eps, int half) {
    long wide = centred ? 2 * d : d;
    float *sums = calloc(PARTS * wide, sizeof(float));
    if (!sums) return 1;
#pragma omp parallel
    {
        float row[d], normal[d];
#pragma omp for schedule(static)
        for (long part = 0; part < PARTS; part++) {
            float *sum_gamma = sums + part * wide, *sum_beta = centred ? sum_gamma + d : 0;
            for (long r = part * rows / PARTS; r < (part + 1) * rows / PARTS; r++) {
                const float *one = x + r * d;
                float mean, factor, flat = 0, along = 0;
                moments(one, d, centred, eps, &mean, &factor);
                load(row, g, r * d, d, half);
                if (sum_beta)
                    for (long i = 0; i < d; i++) sum_beta[i] += row[i];
                for (long i = 0; i < d; i++) {
                    normal[i] = (one[i] - mean) * factor;
                    sum_gamma[i] += row[i] * normal[i];
                    row[i] *= gamma[i];
                }
                for (long i = 0; i < d; i++) along += row[i] * normal[i];
                if (sum_beta)
                    for (long i = 0; i < d; i++) flat += row[i];
                along /= d;
                flat /= d;
                for (long i = 0; i < d; i++)
                    g_x[r * d + i] = factor * (row[i] - flat - normal[i] * along);
            }
        }
    }
    memset(g_gamma, 0, wide * sizeof(float));
    for (long part = 0; part < PARTS; part++)
        for (long i = 0; i < wide; i++) g_gamma[i] += sums[part * wide + i];
    free(sums);
    return 0;
}
