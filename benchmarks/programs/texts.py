"""Texts for the comparison of programs: 200 strings in several scripts, prompts and a chat."""

import random

SENTENCES = {
    "Devanagari": "यह एक छोटा वाक्य है और हिन्दी में लिखा गया क्षेत्र ज्ञान श्री १२३ पढ़ना",
    "Tamil": "இது தமிழில் எழுதப்பட்ட ஒரு சிறிய வாக்கியம் கோப்பு ௧௨ ஸ்ரீ",
    "Khmer": "នេះ ជា ប្រយោគ ខ្លី មួយ ដែល សរសេរ ជា ភាសាខ្មែរ ស្រុក ១២៣",
    "Thai": "นี่คือ ประโยคสั้น ที่เขียนเป็น ภาษาไทย ผู้ใช้ ๑๒๓ น้ำ เก็บไว้",
    "Arabic": "هذه جملة قصيرة مكتوبة باللغة العربية مَكْتَبَة ١٢٣ لا، نعم؟ كتابٌ",
    "Han": "这是 一个 用中文 写的 短句。 数据库 文件，打开 「引号」 12345 漢字",
    "Cyrillic": "это короткое предложение на русском языке Ёлка объём № 42 что-нибудь",
    "German": "Das ist ein kurzer Satz, daß wir's schrieben: e\u0301 ﬁ 3.14 x_y naïve Straße",
    "English": "The people's answer isn't short: we'll have 12345 tokens . They 've DON'T , ok ?",
    "code": 'def __init__(self, x=None): return {"a": [1, 2.5e-3]} # TODO != <= ->',
}
# Text between two words.
JOINS = [" ", " ", " ", "", "\n", "\r\n", ".\n", "  ", "\t", "\u200d", "!? ", "\n\n  ", "\u00a0"]
JOINS += ["1", "\ufeff", "\u2028", "\x85", "\U0001f468\u200d\U0001f469", "'s ", " n't "]

CHAT = [
    {"role": "user", "content": "यह एक The people's"},
    {"role": "assistant", "content": "A short answer."},
    {"role": "user", "content": " isn't it?\n"},
]


def training_texts() -> list[str]:
    """Return the texts on which the BPE tokenizer of the models is trained."""
    return [*SENTENCES.values()] * 30 + random_texts(400, seed=1)


def random_texts(number: int = 200, seed: int = 0) -> list[str]:
    """Return random texts of 1 to 12 words, each in one script."""
    generator = random.Random(seed)
    sentences = list(SENTENCES.values())
    texts = []
    for index in range(number):
        words = sentences[index % len(sentences)].split()
        text = ""
        for _ in range(generator.randint(1, 12)):
            text += generator.choice(words) + generator.choice(JOINS)
        texts.append(text)
    return texts


def prompts(vocab_size: int, number: int = 8, length: int = 40) -> list[list[int]]:
    """Return random token ids below ``vocab_size``: ``number`` prompts of the same length."""
    generator = random.Random(2)
    return [[generator.randrange(1, vocab_size) for _ in range(length)] for _ in range(number)]


# Contexts with endings, and documents, that fit into the context of the models.
PAIRS = [(text[:18] + " a", text[18:30] + " b") for text in random_texts(20, seed=4)]
DOCUMENTS = [text[:30] + "." for text in random_texts(20, seed=5)]
