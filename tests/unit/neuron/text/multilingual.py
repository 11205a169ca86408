"""Difficult text for tokenizers: many scripts, joined emoji, combining marks, runs, controls and lookalikes."""

SCRIPTS = {
    "latin": "The fox isn't lazy; it'll JUMP, WE'RE sure. Zażółć gęślą jaźń — naïve façade, Straße, smørrebrød ﬁne.",
    "vietnamese": "Tiếng Việt có sáu thanh điệu: ngang, huyền, sắc, hỏi, ngã, nặng.",
    "turkish": "İstanbul'da ışıklar söndü, Iğdır'ınki değil.",
    "greek": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία, λοιπόν;",
    "cyrillic": "Съешь ещё этих мягких французских булок, да выпей чаю. Ґанок їжака Ђорђе.",
    "armenian": "Բոլոր մարդիկ ծնվում են ազատ ու հավասար։",
    "georgian": "ყველა ადამიანი იბადება თავისუფალი. ᲗᲑᲘᲚᲘᲡᲘ",
    "hebrew": "כָּל בְּנֵי אָדָם נוֹלְדוּ בְּנֵי חוֹרִין, ושווים (מאוד).",
    "arabic": "يُولَدُ جميعُ الناسِ أحرارًا، ٣٤٥٦٧ مرّة؟ پارسی گچ ژاله",
    "syriac": "ܟܠ ܒܪܢܫܐ ܒܪܝܠܗ ܚܐܪܐ",
    "devanagari": "सभी मनुष्य स्वतंत्र जन्मे हैं। क्षत्रिय ज्ञान १२३४",
    "bengali": "সমস্ত মানুষ স্বাধীনভাবে জন্মগ্রহণ করে। ৪৫৬",
    "tamil": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
    "telugu": "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును స్వతంత్రులు",
    "malayalam": "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടെ ജനിച്ചവരാണ്",
    "sinhala": "සියලු මනුෂ්‍යයෝ නිදහස්ව උපත ලබා ඇත.",
    "thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน ๑๒๓",
    "lao": "ມະນຸດທຸກຄົນເກີດມາມີສິດເສລີພາບ",
    "khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាព",
    "burmese": "လူတိုင်းသည် တူညီ လွတ်လပ်သော",
    "tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་",
    "ethiopic": "የሰው ልጅ ሁሉ ሲወለድ ነጻ ነው።",
    "cherokee": "ᏂᎦᏓ ᎠᏂᏴᏫ ᏂᎨᎫᏓᎸᎾ ꭰꮒᏼꮻ",
    "hangul": "모든 인간은 태어날 때부터 자유로우며 ㅋㅋㅋ ㅎㅎ 존엄하다.",
    "hangul_jamo": "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "japanese": "すべての人間は、生まれながらにして自由である。カタカナ・ﾊﾝｶｸ「引用」１２３ＡＢＣ々〆",
    "chinese": "人人生而自由，在尊严和权利上一律平等。我想在apple工作1314151天～",
    "traditional": "人人生而自由，在尊嚴和權利上一律平等；𠮷野家的𩸽。",
    "mongolian": "ᠬᠦᠮᠦᠨ ᠪᠦᠷ ᠲᠥᠷᠥᠵᠦ",
    "gothic": "𐌼𐌰𐌲 𐌲𐌻𐌴𐍃 𐌹̈𐍄𐌰𐌽",
    "cuneiform": "𒀀𒁀𒂀 𓀀𓁀 𐤀𐤁",
    "mathematics": "𝔸𝒷𝕔 ∀x∈ℝ: ⌈x⌉ ≥ x² − ½x³ ⇒ ∫₀^∞ e⁻ˣ dx ≈ 1 ± 10⁻⁹ Ⅷ ⅔ ①",
}

EMOJI = "🚀 👩‍👩‍👧‍👦🏳️‍🌈🧑🏽‍💻 👍🏿👍🏻 🇨🇭🇯🇵🇺🇳 ❤️‍🔥 1️⃣#️⃣ 😶‍🌫️🦙🦙 ☺︎☺️ 🏴󠁧󠁢󠁷󠁬󠁳󠁿"

MARKS = (
    "e\u0301 a\u0308\u0323 n\u0303o\u0302 Z\u0351\u036b\u0343\u036aa\u0302\u0321l\u0334g\u0321o\u030d "
    "\u0915\u093c \u0958 A\u030a\u212b \u1e9b\u0323"
)

CODE = """\
def f(x: int = 0x1F, *args) -> "list[str]":
\treturn [s.strip()  for s in args if s != '' and x**2 >= 10_000.5e-3]  # don't...

    if (a!=b && c||d) { puts("%d\\n", i++); } /* ---=======--- */
<div class="x">&nbsp;</div>\t\t<!-- {{#each}} -->$$\\frac{1}{2}$$ https://example.org/?q=a%20b&c=[1]#z
SELECT * FROM "t" WHERE id IN (1,22,333,4444,55555,666666,7777777);
"""

RUNS = "".join(
    "x" + " " * count + "y" + "\t" * (count % 5) + "\n" * (count % 7) + "=" * count + "-." * (count % 4)
    for count in range(40)
)

CONTROLS = (
    "nul\x00 bell\x07 esc\x1b[0m del\x7f nel\x85 nbsp\xa0| "
    "zwsp\u200b bom\ufeff rlm\u200f lrm\u200e ls\u2028 ps\u2029 shy\xad vs\ufe0f"
)

REPLACEMENTS = "a genuine \ufffd, two \ufffd\ufffd, noncharacters \ufffe\uffff\U0010ffff, private \ue000"

LINES = "dos\r\nmac\runix\n\r\n\r\n \n \t\n   trailing   \n"

LOOKALIKES = (
    "<|im_start|>user <|im_end <|endoftext|><|endoftext|> <s>x</s> <unk><pad> [INST] hi [/INST] <0x41><0x0A> ▁▁a _ "
    "<bos><start_of_turn>model\n<end_of_turn> <|eot_id|><|begin_of_text|> <|channel|>final<|message|> <｜User｜> "
    "<think>\n\n</think> <tool_call>{}</tool_call> <|fim_prefix|> [CLS][SEP] <|"
)

TEXT = "\n".join([*SCRIPTS.values(), EMOJI, MARKS, CODE, RUNS, CONTROLS, REPLACEMENTS, LINES, LOOKALIKES])
"""All of the texts above."""

PIECES = (*SCRIPTS.values(), EMOJI, MARKS, CODE, RUNS, CONTROLS, REPLACEMENTS, LINES, LOOKALIKES, TEXT)
"""Each of the texts above, and `TEXT`."""
