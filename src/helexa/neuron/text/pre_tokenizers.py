"""Pre-tokenization rules of byte-level BPE, by the names that GGUF files use.

The names and most rules are those of llama.cpp (`llama-vocab.cpp`). Some rules follow the tokenizer.json of the model
instead, because llama.cpp's rule differs from it. llama.cpp lacks the Unicode normalization of some models, and its
regular expressions cannot express some patterns.
"""

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Split


class PreTokenizer(NamedTuple):
    """Rules that split a text into pieces before BPE merges are applied to each piece."""

    # The pre-tokenizer. It returns pieces in the byte-level alphabet, in which a character represents a byte.
    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None  # Unicode normalization of the text before splitting, or None
    ignore_merges: bool = False  # whether a piece that is in the vocabulary becomes one token without applying merges
    # whether a prompt begins with the beginning-of-sequence token if the GGUF file does not specify this
    add_bos: bool = False


_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_GPT_2_WORDS = ByteLevel(add_prefix_space=False, use_regex=True)


def _sequence(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(steps))


def _pieces(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits a text at the matches of `patterns`.

    The patterns are applied one after the other. Both the matches and the text between them become pieces.
    """
    return _sequence(*(Split(Regex(pattern), behavior="isolated") for pattern in patterns), _BYTES)


_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(number: str, letter: str = r"\p{L}", line_ends: str = r"[\r\n]*") -> str:
    """Return the regular expression for words of tiktoken's cl100k and variants."""
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|{number}| ?[^\s{letter}\p{{N}}]+{line_ends}|{_SPACES}"


def _o200k(number: str, suffix: str = f"{_SUFFIX}?", line_ends: str = r"[\r\n/]*", excluded: str = "") -> str:
    """Return the regular expression for words of tiktoken's o200k and variants.

    A change from lower case to upper case also begins a new word.

    Args:
        number: pattern for numbers.
        suffix: pattern for contractions such as `'s` after a word.
        line_ends: pattern for line ends after punctuation.
        excluded: text to append to the character classes for letters, to exclude some characters from the classes.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
    return rf"{word}|{number}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_SPACES}"


_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Words of the bloom family: text between punctuation marks, one of which is the opening parenthesis.
_BLOOM_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# llama.cpp's rules for old files that do not name a pre-tokenizer.
_DEFAULT = PreTokenizer(
    _pieces(
        r"[\p{P}$+<=>^~|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"\p{N}+",
        "[0-9]{3}",
    )
)
_GPT_2 = PreTokenizer(_GPT_2_WORDS)
_GPT_NEOX = _GPT_2._replace(normalizer=normalizers.NFC())
_STARCODER = PreTokenizer(_sequence(Digits(individual_digits=True), _GPT_2_WORDS))
_COMMAND_R = _STARCODER._replace(normalizer=normalizers.NFC())
_FALCON = PreTokenizer(
    _sequence(
        Punctuation("contiguous"), _GPT_2_WORDS, Digits(individual_digits=False), Split(Regex("[0-9]{3}"), "isolated")
    )
)
_FALCON_3 = PreTokenizer(_sequence(Punctuation("contiguous"), _GPT_2_WORDS, Digits(individual_digits=True)))
_SMAUG = PreTokenizer(_pieces(_cl100k(r"\p{N}{1,3}")))
_GLM_4 = _SMAUG._replace(ignore_merges=True)
_LLAMA_3 = _GLM_4._replace(add_bos=True)
_MINICPM_5 = PreTokenizer(_pieces(r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True)
_HUNYUAN = PreTokenizer(_pieces(_cl100k(r"\p{N}")))
_QWEN_2 = _HUNYUAN._replace(normalizer=normalizers.NFC())
_QWEN_3_5 = PreTokenizer(_pieces(_cl100k(r"\p{N}", r"\p{L}\p{M}")), normalizers.NFC())
_SEED = PreTokenizer(_pieces(_cl100k(r"\p{N}", line_ends="")))
_GPT_4O = PreTokenizer(_pieces(_o200k(r"\p{N}{1,3}")), ignore_merges=True)
_TEKKEN = PreTokenizer(_pieces(_o200k(r"\p{N}", suffix="")), ignore_merges=True, add_bos=True)
_KIMI = PreTokenizer(_pieces(r"\p{Han}+|" + _o200k(r"\p{N}{1,3}", line_ends=r"[\r\n]*", excluded=r"&&[^\p{Han}]")))
_DEEPSEEK_LLM = PreTokenizer(
    _pieces(
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
        r"\s+$",
        _DEEPSEEK_CJK,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = PreTokenizer(_pieces(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(_pieces(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS))
_BLOOM = PreTokenizer(_pieces(_BLOOM_WORDS))
_VIKING = PreTokenizer(_pieces(_BLOOM_WORDS, r"\p{N}"))
_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (_DEFAULT, "default"),
    (_GPT_2, "gpt-2 phi-2 jais a.x-4.0 mellum trillion exaone4 granite-docling"),
    (_GPT_NEOX, "mpt olmo"),
    (_STARCODER, "starcoder refact smollm codeshell exaone mellum2"),
    (_COMMAND_R, "command-r"),
    (_FALCON, "falcon"),
    (_FALCON_3, "falcon3"),
    (_SMAUG, "smaug-bpe dbrx chatglm-bpe"),
    (_GLM_4, "glm4 glm5"),
    (_LLAMA_3, "llama-bpe llama-v3 llama3 pixtral lfm2 midm-2.0"),
    (_MINICPM_5, "minicpm5"),
    (_HUNYUAN, "hunyuan megrez kormo grok-2 solar-open bailingmoe bailingmoe2 llada-moe"),
    (_QWEN_2, "qwen2 deepseek-r1-qwen f2llmv2 stablelm2"),
    (_QWEN_3_5, "qwen35"),
    (_SEED, "seed-coder"),
    (_GPT_4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_TEKKEN, "tekken"),
    (_KIMI, "kimi-k2"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (_BLOOM, "bloom gpt3-finnish poro-chat"),
    (_VIKING, "viking"),
)
# Pre-tokenization rules by the value of `tokenizer.ggml.pre` in GGUF files.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rules for rules, names in _RULES for name in names.split()}
