"""How the site's search splits text and queries into words: English as Sphinx does, Chinese into pairs of characters.

Chinese is written without spaces, and Sphinx's own Chinese search needs a dictionary that is not a dependency here. Pairs of neighbouring
characters need none: a text has a word if it has all of the word's pairs. Words of a query that are on no page are left out, so that a
question in whole sentences finds something.
"""

from __future__ import annotations

import re
from itertools import pairwise

from sphinx.search.en import SearchEnglish

QUESTION_WORDS = frozenset(
    {"best", "choose", "get", "give", "gives", "happens", "mean", "means", "need", "set", "use", "want", "way"}
)
"""English words that a question has and an answer lacks."""
QUESTION_PAIRS = frozenset({"为什", "什么", "么是", "怎么", "么办", "如何", "怎样", "哪个", "哪些"})
_RUN = re.compile(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+")

_SPLIT_QUERY = r"""
function splitQuery(query) {
  const inIndex = (word) => {
    const stem = new Stemmer().stemWord(word.toLowerCase());
    const has = (words) => Object.hasOwn(words, stem) || (stem.length > 2 && Object.keys(words).some((known) => known.includes(stem)));
    return has(Search._index.terms) || has(Search._index.titleterms);
  };
  const chinese = /[\u4e00-\u9fff]/;
  const words = (query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{L}\p{N}_])+/gu) || []).flatMap((run) =>
    chinese.test(run) && run.length > 1 ? Array.from(run.slice(1), (character, at) => run[at] + character) : [run]);
  Scorer.chinese = chinese.test(query);
  const known = words.filter((word) => stopwords.has(word.toLowerCase()) || inIndex(word));
  return known.some((word) => !stopwords.has(word.toLowerCase())) ? known : words;
}
"""


class SearchEnglishAndChinese(SearchEnglish):
    """English words by their stems, Chinese as pairs of characters; the single characters are kept for queries of one."""

    lang = "en-zh"
    language_name = "English"  # names the stemmer of the page
    stopwords = SearchEnglish.stopwords | QUESTION_WORDS | QUESTION_PAIRS
    js_splitter_code = _SPLIT_QUERY

    def split(self, input: str) -> list[str]:
        """Return the words of a text, for the index."""
        return [word for run in _RUN.findall(input) for word in pieces(run)]


def pieces(run: str) -> list[str]:
    """Return a run of letters as it is, and a run of Chinese characters as characters and pairs."""
    if not "\u4e00" <= run[0] <= "\u9fff":
        return [run]
    return [*run, *map("".join, pairwise(run))]
