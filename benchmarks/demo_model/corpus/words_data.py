"""Opposites, plurals, past tenses, synonyms, animals and rhymes: words that belong to other words."""

OPPOSITES = """
hot cold, big small, fast slow, high low, long short, old young, new old, good bad, happy sad, light dark, day night,
black white, up down, left right, in out, open closed, full empty, early late, easy difficult, hard soft, strong weak,
rich poor, clean dirty, dry wet, thick thin, wide narrow, deep shallow, heavy light, loud quiet, near far,
first last, front back, top bottom, inside outside, above below, before after, begin end, start finish, come go,
give take, buy sell, win lose, love hate, laugh cry, push pull, ask answer, teach learn, remember forget, find lose,
arrive leave, rise fall, sit stand, sleep wake, live die, build destroy, catch throw, lend borrow, accept refuse,
add subtract, multiply divide, agree disagree, appear disappear, arrive depart, attack defend, believe doubt,
break repair, bring remove, float sink, follow lead, freeze melt, grow shrink, help hinder, hide show, join separate,
raise lower, lock unlock, praise blame, save waste, send receive, shout whisper, succeed fail, tie untie, wake sleep,
true false, right wrong, same different, alive dead, awake asleep, brave cowardly, bright dim, broad narrow,
calm excited, careful careless, cheap expensive, clever stupid, common rare, complete incomplete, correct incorrect,
cruel kind, dangerous safe, famous unknown, fat thin, fair unfair, fresh stale, friendly unfriendly, generous stingy,
gentle rough, glad sorry, guilty innocent, healthy sick, honest dishonest, huge tiny, important unimportant,
interesting boring, known unknown, large small, lazy busy, legal illegal, likely unlikely, loose tight, lucky unlucky,
major minor, many few, married single, modern ancient, more less, most least, natural artificial, necessary unnecessary,
noisy quiet, north south, east west, odd even, often seldom, always never, patient impatient, perfect imperfect,
permanent temporary, pleasant unpleasant, polite rude, possible impossible, present absent, pretty ugly,
private public, proud ashamed, raw cooked, real imaginary, regular irregular, sharp blunt, simple complex,
smooth rough, sour sweet, straight curved, tall short, tame wild, together apart, useful useless, visible invisible,
warm cool, wise foolish, yes no, war peace, friend enemy, heaven hell, summer winter, spring autumn, morning evening,
beginning ending, question reply, success failure, victory defeat, truth lie, joy sorrow, hope despair, life death,
entrance exit, floor ceiling, husband wife, king queen, man woman, boy girl, brother sister, father mother, son daughter,
uncle aunt, nephew niece, hero villain, buyer seller, teacher student, city village,
land sea, sun moon, maximum minimum, positive negative, plus minus, wealth poverty, strength weakness, length width,
profit loss, import export, increase decrease, expand contract, forward backward, over under, with without,
now then, here there, everything nothing, everybody nobody, everywhere nowhere, asleep awake, female male,
optimist pessimist, knowledge ignorance, courage fear, freedom slavery, order chaos, ally opponent, past future,
upstairs downstairs, outdoor indoor, upper lower, northern southern, eastern western, solid liquid
"""  # noqa: E501

PLURALS = """
cat cats, dog dogs, house houses, book books, tree trees, car cars, girl girls, boy boys, day days, key keys,
box boxes, fox foxes, bus buses, glass glasses, dish dishes, watch watches, church churches, brush brushes, bench benches,
class classes, baby babies, city cities, country countries, story stories, party parties, lady ladies, berry berries,
fly flies, pony ponies, puppy puppies, family families, leaf leaves, knife knives, wife wives, life lives, wolf wolves,
shelf shelves, half halves, calf calves, loaf loaves, thief thieves, elf elves, scarf scarves, child children, man men,
woman women, foot feet, tooth teeth, goose geese, mouse mice, ox oxen, person people, sheep sheep, deer deer, fish fish,
potato potatoes, tomato tomatoes, hero heroes, echo echoes, photo photos, piano pianos, radio radios, zoo zoos,
roof roofs, chief chiefs, cactus cacti, crisis crises, apple apples, egg eggs, bird birds, hand hands, horse horses,
island islands, king kings, letter letters, monkey monkeys, toy toys, table tables, window windows, friend friends,
computer computers, number numbers, answer answers, question questions, language languages, orange oranges, page pages,
rose roses, bridge bridges, nose noses, beach beaches, witch witches, match matches, kiss kisses, wish wishes, tax taxes
"""  # noqa: E501

PASTS = """
go went, come came, see saw, do did, have had, be was, eat ate, drink drank, run ran, swim swam, sing sang, ring rang,
begin began, give gave, take took, make made, say said, tell told, think thought, buy bought, bring brought, catch caught,
teach taught, fight fought, seek sought, find found, get got, forget forgot, know knew, grow grew, throw threw, fly flew,
draw drew, blow blew, write wrote, ride rode, drive drove, rise rose, speak spoke, break broke, steal stole, choose chose,
freeze froze, wake woke, wear wore, tear tore, sleep slept, keep kept, feel felt, meet met, leave left, lose lost,
send sent, spend spent, build built, lend lent, sit sat, stand stood, understand understood, win won, sell sold,
hold held, hear heard, pay paid, lead led, feed fed, read read, cut cut, put put, hit hit, let let, shut shut, cost cost,
fall fell, hang hung, hide hid, bite bit, shake shook, shine shone, shoot shot, spin spun, dig dug, stick stuck, sink sank,
walk walked, talk talked, play played, work worked, look looked, ask asked, call called, help helped, love loved,
live lived, stop stopped, plan planned, try tried, cry cried, carry carried, study studied, jump jumped, open opened,
close closed, start started, move moved, visit visited, travel travelled, want wanted, need needed, clean cleaned, cook cooked
"""  # noqa: E501

SYNONYMS = """
big large, small little, happy glad, sad unhappy, fast quick, smart clever, begin start, end finish, angry cross,
beautiful lovely, rich wealthy, ill sick, quiet silent, brave bold, difficult hard, easy simple, strange odd, scared afraid,
tired weary, funny amusing, kind nice, large big, quick fast, shut close, speak talk, shout yell, jump leap, buy purchase,
choose pick, help assist, answer reply, road street, home house, gift present, job work, child kid, error mistake,
forest wood, ocean sea, stone rock, rare uncommon, wise clever, thin slim, huge enormous, tiny minute, correct right,
strong powerful, calm peaceful, hurry rush, repair mend
"""  # noqa: E501

# animal | sound | young
ANIMALS = """\
dog|barks|puppy
cat|meows|kitten
cow|moos|calf
sheep|bleats|lamb
goat|bleats|kid
pig|grunts|piglet
horse|neighs|foal
donkey|brays|foal
hen|clucks|chick
duck|quacks|duckling
goose|honks|gosling
lion|roars|cub
tiger|roars|cub
bear|growls|cub
wolf|howls|pup
fox|barks|cub
frog|croaks|tadpole
snake|hisses|snakelet
bee|buzzes|larva
owl|hoots|owlet
mouse|squeaks|pup
elephant|trumpets|calf
monkey|chatters|infant
turkey|gobbles|poult
crow|caws|chick
pigeon|coos|squab
rooster|crows|chick
deer|bellows|fawn
seal|barks|pup
whale|sings|calf
rabbit|squeaks|kit
swan|hisses|cygnet
eagle|screeches|eaglet
"""

# words that rhyme
RHYMES = """
cat hat bat, day play way, night light bright, sun fun run, moon soon spoon, star far car, tree free bee, sea me key,
house mouse louse, dog fog log, ball fall tall, rain train plane, snow go slow, sky fly high, cake lake snake,
book look cook, fish dish wish, bear pear hair, king sing ring, red bed head, blue shoe two, green queen seen,
bread red said, boat coat goat, time rhyme lime, door floor four, hand land sand, heart part start, fox box socks,
dream cream stream, hill mill still, nose rose toes, ship trip lip, song long strong, fire wire tire
"""
