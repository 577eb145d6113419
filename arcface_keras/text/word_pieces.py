"""BERT's tokenizer: words, then the longest pieces of them that the vocabulary knows."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

_LONGEST_WORD = 100
_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPieces:
    """Text to numbers of pieces, between [CLS] and [SEP] (Devlin et al., BERT, 2019).

    Args:
        vocabulary: `vocab.txt`, a piece a line, or the pieces; "##" begins one that continues a word.
        lowercase: lower case without accents, as the uncased models want; False keeps text as it is.

    Attributes:
        vocabulary: the pieces in their order.
        numbers: number of each piece.
        lowercase: as given.
        pad: number of [PAD], which fills up shorter texts; 0 where the vocabulary has none.
    """

    def __init__(self, vocabulary: str | Path | Sequence[str], lowercase: bool = True) -> None:
        if isinstance(vocabulary, str | Path):
            # Some pieces are separators to `splitlines`, which would shift the numbers behind them.
            lines: Sequence[str] = Path(vocabulary).read_text("utf-8").removesuffix("\n").split("\n")
            shown = str(vocabulary)
        else:
            lines, shown = vocabulary, f"{len(vocabulary)} pieces"
        self.vocabulary = list(lines)
        self.numbers = {piece: number for number, piece in enumerate(lines)}
        self.lowercase = lowercase
        self.pad = self.numbers.get("[PAD]", 0)
        missing = [piece for piece in ("[CLS]", "[SEP]", "[UNK]") if piece not in self.numbers]
        if missing:
            raise ValueError(
                f"A vocabulary must hold [CLS], [SEP] and [UNK]. Received: {shown} without {missing}."
            )

    def __call__(self, text: str, longest: int) -> list[int]:
        """Numbers of the pieces, at most `longest` with both ends."""
        unknown = self.numbers["[UNK]"]
        pieces: list[int] = []
        for word in split_words(text, self.lowercase):
            pieces += self._pieces(word) or [unknown]
        return [self.numbers["[CLS]"], *pieces[: longest - 2], self.numbers["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        """Greedy longest pieces from the left; none where one cannot be found."""
        if len(word) > _LONGEST_WORD:
            return []
        found: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            stop = next(
                (stop for stop in range(len(word), start, -1) if prefix + word[start:stop] in self.numbers),
                None,
            )
            if stop is None:
                return []
            found.append(self.numbers[prefix + word[start:stop]])
            start = stop
        return found


def split_words(text: str, lowercase: bool = True) -> list[str]:
    """Words; every punctuation mark and CJK character stands alone.

    Args:
        text: any.
        lowercase: lower case, and letters without their accents.
    """
    marks = []
    for character in unicodedata.normalize("NFD", text.lower()) if lowercase else text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category.startswith("Z"):
            marks.append(" ")
        elif (lowercase and category == "Mn") or category.startswith("C") or character == "\ufffd":
            continue
        elif _stands_alone(character, category):
            marks.append(f" {character} ")
        else:
            marks.append(character)
    return "".join(marks).split()


def _stands_alone(character: str, category: str) -> bool:
    code = ord(character)
    # BERT counts all ASCII that is no letter or digit, such as $ and +, among the punctuation.
    symbol = code < 128 and not character.isalnum()
    return symbol or category.startswith("P") or any(low <= code <= high for low, high in _CJK)
