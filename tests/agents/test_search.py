import math
from collections import Counter

import pytest

from lockstep.agents import ToolError
from lockstep.agents.search import Index, Passage, search, search_tool
from lockstep.errors import ConfigError

TEXTS = [
    "The cat sat on the mat.",
    "A dog and a cat: the cat won.",
    "Nothing here",
    "Dogs, dogs and more dogs; no dog",
    "a dog and a cat: the cat won",
]


def plain_score(query, text):
    """BM25 word by word, from the formula."""
    words = [t.lower().replace(".", "").replace(":", "").replace(",", "").replace(";", "").split() for t in TEXTS]
    mean = sum(map(len, words)) / len(words)
    own, total = words[TEXTS.index(text)], 0.0
    for word in query.split():
        n, f = sum(word in w for w in words), Counter(own)[word]
        total += math.log(1 + (len(words) - n + 0.5) / (n + 0.5)) * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * len(own) / mean))
    return total


@pytest.mark.parametrize("query", ["cat", "the dog", "dogs more cat cat", "zebra"])
def test_scores_are_bm25(query):
    found = Index([Passage(str(i), text) for i, text in enumerate(TEXTS)]).scores(query)
    assert found.tolist() == pytest.approx([plain_score(query, text) for text in TEXTS])


def test_the_best_come_first_and_ties_in_the_order_of_files():
    index = Index([Passage(str(i), text) for i, text in enumerate(TEXTS)])
    assert [p.source for p in index.best("cat won", 3)] == ["1", "4", "0"]
    assert [p.source for p in index.best("mat", 3)] == ["0"]
    assert index.best("zebra", 3) == []


def test_a_folder_is_searched_by_passages_and_rows(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("# Oslo\nCapital of Norway.\n\n\nBergen has rain.\n")
    (tmp_path / "sub" / "a.jsonl").write_text('{"text": "Bergen lies in the west."}\n\n{"contents": "Tromsø is dark."}\n')
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe Bergen")
    tool = search_tool(str(tmp_path), 3)
    assert tool.function(query="BERGEN rain") == "[b.md:5]\nBergen has rain.\n\n[sub/a.jsonl:1]\nBergen lies in the west."
    assert tool.function(query="tromsø") == "[sub/a.jsonl:3]\nTromsø is dark."
    assert "no passage" in tool.function(query="Paris")
    with pytest.raises(ToolError, match="no words"):
        search("?!", str(tmp_path), 3)


def test_what_cannot_be_searched_is_said_by_its_key(tmp_path):
    with pytest.raises(ConfigError, match="agent.search_folder"):
        search_tool(None, 3)
    with pytest.raises(ConfigError, match="not a folder"):
        search_tool(str(tmp_path / "none"), 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text"):
        search_tool(str(tmp_path / "empty"), 3)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.jsonl").write_text('{"title": 1}\n')
    with pytest.raises(ConfigError, match=r"x.jsonl, line 1.*contents"):
        search_tool(str(tmp_path / "bad"), 3)
    (tmp_path / "bad" / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        search_tool(str(tmp_path / "bad"), 3)
