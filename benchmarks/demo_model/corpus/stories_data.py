"""The parts of stories and poems."""

# hero, and whether he, she or it
HEROES = """
fox it, bear it, wolf it, cat it, dog it, mouse it, rabbit it, owl it, duck it, frog it, horse it, goat it, sheep it, pig it,
cow it, hen it, lion it, tiger it, elephant it, monkey it, penguin it, whale it, turtle it, snail it, bee it, ant it,
butterfly it, spider it, squirrel it, hedgehog it, deer it, crow it, sparrow it, goose it, donkey it, kitten it, puppy it,
dragon it, unicorn it, robot it, snowman it, ghost it, giant he, king he, queen she, prince he, princess she, knight he,
wizard he, witch she, pirate he, sailor he, farmer he, baker he, fisherman he, painter she, doctor she, teacher she,
gardener she, dancer she, girl she, boy he, pilot she, astronaut she, scientist she, poet he, cook he, train it, boat it,
star it, cloud it, teapot it
"""  # noqa: E501
PLACES = """\
in a quiet forest
by the wide sea
on a small island
in a green valley
on a high mountain
in a little village
in a big city
beside a blue lake
near an old bridge
on a sunny farm
in a dark cave
at the edge of a desert
in a snowy land
behind a tall castle
in a garden full of roses
under an old oak
in a narrow street
next to a lighthouse
in a busy harbour
on the bank of a river
in a windy field
in a house made of stone
above a bakery
in a warm attic
near the railway station
in a far country
among the hills
in a land of long winters
by a deep well
at the foot of a volcano
in a wooden hut
in a valley of apple trees
behind the old school
on the roof of a tower
in a little blue house
near a waterfall
in a swamp full of frogs
on a quiet beach
beside a windmill
in a town without a clock
in a library
at the end of the road
under a red bridge
in a meadow of tall grass
"""
NAMES = {
    "he": """
Milo Otto Finn Hugo Toby Oscar Max Leo Felix Bruno Sam Jonas Arlo Emil Karl Basil Edgar Gus Igor Paul
""".split(),
    "she": """
Nora Luna Ruby Ella Mina Lily Ivy Rosa Zoe Tilly Alma Daisy Greta Juno Wanda Dora Flora Hattie Jade Anna
""".split(),
}
ADJECTIVES = "little brave clever shy kind curious cheerful lonely quiet young old friendly".split()
HELPERS = """
mole beaver stork badger swan toad cricket magpie lizard raven pony otter firefly parrot
shepherd miller postman tailor clockmaker grandmother traveller shoemaker merchant nurse singer
""".split()

# wish | obstacle | what the helper did | what came of it
PLOTS = """\
to see the world from above|the hills were too low and there were no stairs|showed {name} a secret path up to the highest rock|From there {name} saw rivers, towns and the far sea
to find a friend|everybody was too busy to talk|asked {name} to share a warm supper|From that evening on {name} was never alone
to learn to sing|{their} voice was very small|taught {name} one quiet song, note by note|Soon everybody stopped to listen when {name} sang
to cross the great river|the bridge had fallen in a storm|built a small raft out of branches|Together they floated safely to the other side
to find a lost key|it had grown dark and nobody had a lamp|searched every corner with a bright lamp|At last {name} saw the key under a leaf
to bake a cake for the feast|there was no flour left in the house|brought a bag of flour and a jar of honey|The cake was so good that nobody left a crumb
to see the snow|it was summer and the sun was hot|told {name} about the white top of a mountain|After a long walk {name} stood in the snow and laughed
to catch a falling star|the stars were much too far away|pointed at the water, where every star was shining|{name} held one in {their} hands and made a wish
to grow the biggest pumpkin|it had not rained for weeks|brought water from the well, day after day|In autumn the pumpkin was as big as a cart
to win the race|the others were faster and stronger|said that slow and steady steps are best|{name} never stopped once and came in first
to read the old book|the letters looked like tiny ants|explained the letters one by one|When winter came {name} read the whole book aloud
to sleep through the night|the wind made strange noises|explained every noise|After that {name} was not afraid any more and slept until morning
to go home|fog lay over the land and all roads looked alike|led the way with a little bell|{name} followed the sound and soon saw {their} own door
to find the hidden treasure|the map was torn in two|brought the other half of the map|They dug all day and found a box of old letters and one gold coin
to paint the sunset|there was no red paint left|made a fine red out of berries|The picture hangs in the town hall to this day
to mend the broken clock|one small wheel was missing|found the wheel in a bird's nest|The clock struck twelve and the whole town cheered
to give the best present|{name} had no money at all|said that time is the best present of all|So {name} stayed all day, and nobody wished for anything more
to fly|{name} had always been afraid of falling|made two wings of paper and string|For a moment {name} rose into the air, and it was wonderful
to be brave|even {their} own shadow was frightening|told {name} that brave people are afraid too|The next day {name} walked through the dark alone
to hear the sea|the sea was a hundred days away|gave {name} a large white shell|Every night {name} held it close and heard the waves
to keep the garden alive|a cold frost was coming|covered every flower with warm straw|In spring the garden was full of colours again
to make the sad king laugh|no joke had helped for years|whispered a very silly riddle|{name} told it at court and the king laughed until he cried
to learn the secret of time|nobody had ever found it|said that the secret is to look closely|{name} watched a flower open and understood
to find a warm place for the winter|all the holes and huts were taken|made room beside a warm fire|They told each other stories until spring came
"""  # noqa: E501
OPENINGS = (
    "Once upon a time there was {a_adj} {hero} called {name} who lived {place}.",
    "Long ago {a_adj} {hero} called {name} lived {place}.",
    "There once was {a_adj} {hero} called {name} who lived {place}.",
)
WISHES = (
    "More than anything, {name} wanted {wish}.",
    "Every day {name} dreamed of one thing: {wish}.",
    "{name} had one great wish: {wish}.",
)
OBSTACLES = ("But {obstacle}.", "Sadly, {obstacle}.", "There was one problem: {obstacle}.")
HELPS = (
    "One morning {a_helper} came by and {help}.",
    "Then {name} met {a_helper}, who {help}.",
    "Luckily, {a_helper} heard about it and {help}.",
)
ENDINGS = (
    "{name} never forgot that day.",
    "And if you go there, you may still meet {name}.",
    "From then on {name} helped everybody who had a wish.",
    "{name} and the {helper} stayed friends for ever.",
    "That evening {name} fell asleep with a smile.",
    "And they all lived happily ever after.",
)
NEXT = (
    "The next year {name} went back to thank the {helper}, and they had tea together.",
    "{name} and the {helper} set out to help the next one who had a wish.",
    "After that, {name} told the story to everybody who wanted to hear it.",
)

# lines with / between them
POEMS = """\
I saw the {s} at break of day,/And it had quite a lot to say./It stayed with me till evening light/And softly wished me then good night.
Oh {s}, I think of you tonight,/Beneath the moon so round and bright./And when the morning comes to me,/It is the {s} I hope to see.
The {s} is old, the {s} is new,/It is a friend to me and you./Through summer sun and winter snow/It is the nicest thing I know.
I wrote a line about the {s},/And then a second, word by word;/The third one came to me by chance,/The fourth flew to me like a bird.
Here is the {s}, so calm and still,/Just like the grass upon the hill./And if you look, and look once more,/You see what was not there before.
When I was small, so people tell,/I knew the {s} and loved it well./Now I am grown, and still it seems/The {s} is living in my dreams.
The {s} and I, we sat alone/Upon a little grey old stone./We did not speak, we did not play,/And yet it was a perfect day.
Who made the {s}? I do not know./I only see it come and go./It makes me glad, it makes me sing,/It is a plain and lovely thing.
"""  # noqa: E501
UNIQUE = "sea moon sun wind morning night".split()  # the sea
MASSES = "rain snow summer winter spring autumn fire".split()  # the rain, or rain
SUBJECTS = """
river forest mountain fox cat dog bird flower rose tree star rainbow cloud garden lake island lighthouse butterfly bee owl
horse whale robot computer book clock train ship bridge city village road lamp dragon heart song dream
""".split()  # the river, or a river  # noqa: E501
