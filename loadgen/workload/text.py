"""Plain English text from a seeded generator; no two calls share more than chance allows."""

from __future__ import annotations

from random import Random

_VOCABULARY = """
a able about above across add after again against age ago air all almost alone along already also
always am among an and animal another answer any appear area arm around arrive art as ask at away
back bag ball bank base be bear beat beautiful because become bed been before began begin behind
believe below best better between big bird black blue boat body book both bottom box boy bring
brother brought brown build built burn business but buy by call came can car care carry case catch
cause center certain chair chance change check child choose circle city class clean clear close
cloud coast cold color come common company complete contain control cook cool copy corner correct
cost could count country course cover cross cry cup current cut dark day deal decide deep develop
did differ direct discuss distance divide do doctor does done door down draw dream dress drink
drive drop dry during each ear early earth ease east eat edge effect egg eight either else end
energy engine enough enter equal even evening event ever every exact example except expect explain
eye face fact fall family far farm fast father feel feet few field fight figure fill final find
fine finger finish fire first fish five floor flow flower fly follow food foot for force forest
form forward found four free fresh friend from front fruit full game garden gave general gentle
get girl give glass go gold gone good got govern grand grass great green ground group grow guess
guide had hair half hand happen happy hard has hat have he head hear heart heat heavy held help
her here high hill him his history hold home hope horse hot hour house how huge human hundred hunt
hurry ice idea if imagine in inch include increase industry insect instant interest iron island it
job join joy jump just keep kept key kind king knew know lady lake land language large last late
laugh law lay lead learn least leave left leg length less let letter level lie life lift light
like line list listen little live local locate log long look lost lot loud love low machine made
main major make man many map mark market mass master material matter may me mean measure meat meet
men metal method middle might mile milk million mind mine minute miss mix modern moment money
month moon more morning most mother motion mountain mouth move much multiply music must my name
nation nature near necessary neck need never new next night nine no noise noon nor north nose note
nothing notice noun now number object observe ocean of off offer office often oil old on once one
only open operate opposite or order other our out over own oxygen page paint pair paper part party
pass past path pattern pay people perhaps period person phrase pick picture piece place plain plan
plane planet plant play please plural point poor port pose position possible pound power practice
prepare present press pretty print problem process produce product property protect prove provide
pull push put question quick quiet quite race radio rain raise ran range rather reach read ready
real reason receive record red region remember repeat reply represent require rest result rich
ride right ring rise river road rock roll room root rope round row rub rule run safe sail salt
same sand sat save saw say scale school science sea search season seat second section see seed
seem segment select self sell send sense sentence separate serve set settle seven several shape
share sharp she ship shoe shop shore short should shoulder show side sight sign silent silver
similar simple since sing sister sit six size skill skin sky sleep slip slow small smell smile
snow so soft soil soldier solution some son song soon sound south space speak special speech speed
spell spend spoke spot spread spring square stand star start state station stay steam steel step
stick still stone stood stop store story straight strange stream street stretch string strong
student study subject success such sudden sugar suggest suit summer sun supply support sure
surface surprise swim symbol system table take talk tall teach team tell temperature ten test than
thank that the their them then there these they thick thin thing think third this those though
thought thousand three through throw thus tie time tiny tire to together told tone too took tool
top total touch toward town track trade train travel tree triangle trip trouble truck true try
tube turn twenty two type under unit until up use usual valley value vary verb very view village
visit voice vowel wait walk wall want war warm was wash watch water wave way we wear weather week
weight well went were west what wheel when where whether which while white who whole whose why
wide wife wild will wind window wing winter wire wish with woman wonder wood word work world would
write written wrong yard year yellow yes yet you young your
"""
_WORDS = tuple(_VOCABULARY.split())


def prose(rng: Random, chars: int) -> str:
    """Sentences of random words, exactly `chars` characters long."""
    if chars < 1:
        raise ValueError(f"chars must be positive, got {chars}")
    sentences: list[str] = []
    length = 0
    while length <= chars:
        words = rng.choices(_WORDS, k=rng.randint(6, 16))
        sentences.append(" ".join(words).capitalize() + ".")
        length += len(sentences[-1]) + 1
    # Cut, then close the last sentence, so that the length is exact and no space trails.
    return " ".join(sentences)[: chars - 1].rstrip().ljust(chars - 1, "s") + "."
