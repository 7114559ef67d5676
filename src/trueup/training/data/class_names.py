"""Names of classes, in the order of the labels."""

from __future__ import annotations

TEN = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
HUNDRED = tuple(_HUNDRED.split())
CELLS = (
    *("basophil", "eosinophil", "erythroblast", "immature granulocytes"),
    *("lymphocyte", "monocyte", "neutrophil", "platelet"),
)
QUESTIONS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")
STARS = ("very negative", "negative", "neutral", "positive", "very positive")
GROUPS = (
    *("alt.atheism", "comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware"),
    *("comp.windows.x", "misc.forsale", "rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey"),
    *("sci.crypt", "sci.electronics", "sci.med", "sci.space", "soc.religion.christian", "talk.politics.guns"),
    *("talk.politics.mideast", "talk.politics.misc", "talk.religion.misc"),
)
