"""Stop texts: where a sample ends, and what of it may already be shown."""

from collections.abc import Sequence


class TextUntil:
    """The text of one sample up to the first stop text, which is not part of it.

    ``add`` takes what was written and returns what is certain; it holds back what may turn out to
    be the beginning of a stop text. ``end`` returns what is still held when the writing is over.
    ``done`` is True once a stop text came. Stop texts are sought in what is added only.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.done = False
        self._held = ""

    def add(self, text: str) -> str:
        shown = ""
        for character in text:
            if self.done:
                break
            self._held += character
            completed = [stop for stop in self.stops if self._held.endswith(stop)]
            if completed:
                self.done = True
                shown += self._held[: -max(map(len, completed))]
                self._held = ""
            else:
                certain = len(self._held) - self._open()
                shown += self._held[:certain]
                self._held = self._held[certain:]
        return shown

    def end(self) -> str:
        held, self._held = self._held, ""
        return held

    def _open(self) -> int:
        """The length of the longest end of the held text with which a stop text begins."""
        for start in range(len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self.stops):
                return len(self._held) - start
        return 0
