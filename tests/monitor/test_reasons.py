"""Every reason has its sentence, and says the numbers that it was told."""

from __future__ import annotations

from radixkv_monitor import reasons
from tests.monitor import samples


def test_a_prompt_that_departs_from_what_is_cached() -> None:
    request = samples.request(cached_tokens=80, miss_reason="diverged", miss_at=80)
    assert reasons.miss(request) == (
        "80 of 100 prompt tokens (80%) were cached. At token 80 the prompt departs from everything that is cached."
    )
    assert reasons.miss_word(request) == "diverged @80"


def test_a_prompt_whose_rest_was_evicted() -> None:
    request = samples.request(
        miss_reason="evicted",
        miss_at=60,
        miss_evicted_tokens=16,
        miss_evicted_ago=12.0,
        miss_pressure="to make room for 3 blocks when 1 were free",
    )
    assert reasons.miss(request).endswith(
        "From token 60 on, 16 tokens more would have matched, but went 12 s before, to make room for 3 blocks when 1 "
        "were free."
    )


def test_new_and_whole_and_unadmitted_prompts() -> None:
    assert "never computed here" in reasons.miss(samples.request(miss_reason="never_seen", miss_at=60))
    assert "last token is always computed" in reasons.miss(samples.request(miss_reason="full", cached_tokens=99))
    assert reasons.miss(samples.request(admitted=None, miss_reason=None)).startswith("It has not been admitted")
    assert reasons.miss_word(samples.request(admitted=None, miss_reason=None)) == ""
    assert reasons.miss_word(samples.request(miss_reason="full", miss_at=None)) == "full"


def test_an_eviction_and_its_regret() -> None:
    record = samples.eviction(node=7, start=32, tokens=64, blocks=4, idle_s=95.0, hits=2)
    assert reasons.eviction(record) == (
        "Tokens 32 to 96 of node 7 went, to make room for 4 blocks when 0 were free: 4 blocks, unused for 1.6 min, "
        "hit 2 times until then. Nobody has asked for them since."
    )
    regretted = samples.eviction(time=1000.0, wanted_again=1012.0)
    assert "asked for again 12 s later" in reasons.eviction(regretted)


def test_every_phase_has_a_glyph_of_its_own_and_a_style() -> None:
    assert reasons.GLYPHS.keys() == reasons.STYLES.keys()
    assert len(set(reasons.GLYPHS.values())) == len(reasons.GLYPHS)
