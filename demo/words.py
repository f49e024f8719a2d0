"""The words that demo prompts are made of. Knows nothing of prompts, tokens or models.

The tokenizer gives each of these words, with the space before it, exactly one token, so that a
fact is always six tokens long. Changing a list changes the tokenizer: train the checkpoint anew.
"""

from typing import Final


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES: Final = _split(
    """
    Ada Agnes Aldo Alma Amos Anouk Ansel Anton Arlo Asta Aubrey Axel Basil Beata Benno Bianca
    Birgit Boris Bram Bruno Calla Carlo Casper Cecil Celia Clara Clive Conrad Cora Cosmo Cyrus
    Dagny Daria Davi Delia Desmond Dina Dora Edda Edgar Elio Elsa Emil Enzo Erika Esme Ezra Fabio
    Faye Felix Fiona Flora Floyd Frida Gemma Gideon Gilda Giles Greta Gustav Hanna Harald Hazel
    Hedda Heidi Hiro Hugo Ida Igor Ilse Imogen Ines Ingrid Iris Isak Ivo Jana Jasper Joan Jonas
    Judit Juno Kaja Karin Kasimir Keiko Kiran Klara Knut Lars Leila Lena Leon Linus Lotte Luca
    Lydia Mabel Magda Malik Mara Marius Mateo Milo Mina Moira Nadia Nestor Nils Nina Noor Olaf
    Olga Orla Oscar Otis Otto Paula Pavel Petra Piers Quentin Rafael Ravi Renata Rhea Rufus Runa
    Sabine Samir Selma Silas Sonja Stefan Sven Tamar Tarik Tessa Thea Tobin Tomas Ulla Ursula Vera
    Viktor Vito Wanda Wilma Xenia Yara Yusuf Zelda Zoltan Zora
    """
)

ADJECTIVES: Final = _split(
    """
    amber ancient azure bent blue brass broken bronze carved clean copper coral cracked crimson
    crooked dented dusty empty faded fancy flat folded frozen gilded glass golden gray green heavy
    hollow iron ivory jade knotted leather little long marble mossy muddy narrow oak old orange
    painted pale paper patched pink plain polished purple round rusty scarlet shiny silver smooth
    square stone striped tiny velvet wooden woven
    """
)

OBJECTS: Final = _split(
    """
    anchor apron arrow badge banjo barrel basket bell bottle bowl box bracelet brush bucket button
    candle chain clock coin comb compass cup dagger drum fan feather flute fork globe glove hammer
    harp hat hook jar kettle key kite knife ladder lamp lantern lens locket map mask mirror
    necklace needle pipe pot ribbon ring rope saddle shell shield spoon stamp sword thimble
    trumpet vase whistle
    """
)

FRAME: Final = _split("Facts : keeps the . Question what does everyone keep ? Answer")
"""Every other word of a prompt or an answer."""
