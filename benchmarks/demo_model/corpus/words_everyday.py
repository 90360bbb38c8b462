"""Everyday tables: units, parts of things, colours, and cards on days, months, seasons and words."""

# how many | in what | so many
UNITS = """\
seconds|a minute|60
minutes|an hour|60
hours|a day|24
days|a week|7
days|a year|365
weeks|a year|52
months|a year|12
seasons|a year|4
minutes|a day|1,440
seconds|an hour|3,600
hours|a week|168
years|a decade|10
years|a century|100
years|a millennium|1,000
days|a leap year|366
days|a fortnight|14
minutes|half an hour|30
minutes|a quarter of an hour|15
centimetres|a metre|100
millimetres|a centimetre|10
millimetres|a metre|1,000
metres|a kilometre|1,000
meters|a kilometer|1,000
centimeters|a meter|100
grams|a kilogram|1,000
grams|a kilo|1,000
kilograms|a tonne|1,000
milligrams|a gram|1,000
millilitres|a litre|1,000
milliliters|a liter|1,000
inches|a foot|12
feet|a yard|3
inches|a yard|36
feet|a mile|5,280
yards|a mile|1,760
ounces|a pound|16
pints|a gallon|8
quarts|a gallon|4
pints|a quart|2
cups|a pint|2
bits|a byte|8
bytes|a kilobyte|1,000
cents|a dollar|100
pence|a British pound|100
cents|a euro|100
degrees|a circle|360
degrees|a right angle|90
things|a dozen|12
letters|the English alphabet|26
vowels|the English alphabet|5
cards|a deck of cards|52
players|a football team|11
players|a basketball team|5
colours|a rainbow|7
"""

# how many | what has them | so many
PARTS = """\
legs|a spider|8
legs|an insect|6
legs|an ant|6
legs|a dog|4
legs|a cat|4
legs|a horse|4
legs|a bird|2
legs|a snake|no
wings|a bird|2
wings|a butterfly|4
arms|an octopus|8
eyes|a person|2
fingers|a hand|5
toes|a foot|5
teeth|a grown person|32
bones|a grown person|206
wheels|a car|4
wheels|a bicycle|2
wheels|a tricycle|3
strings|a guitar|6
strings|a violin|4
keys|a piano|88
sides|a triangle|3
sides|a square|4
sides|a pentagon|5
sides|a hexagon|6
sides|an octagon|8
corners|a triangle|3
corners|a square|4
faces|a cube|6
zeros|a hundred|2
zeros|a thousand|3
zeros|a million|6
squares|a chessboard|64
"""

MIXES = "red yellow orange, blue yellow green, red blue purple, red white pink, black white grey, red green brown"

# colour | things
COLOURS = """\
blue|the sky;the sea;a sapphire;a blueberry
green|grass;a leaf;a frog;an emerald;a cucumber;a pea
white|snow;milk;salt;a swan;a polar bear;flour
black|coal;a raven;the night;tar
red|blood;a tomato;a strawberry;a ruby;a cherry;a fire engine
yellow|a lemon;a banana;the sun;a sunflower;butter
orange|an orange;a carrot;a pumpkin
brown|chocolate;wood;soil;coffee;a chestnut
pink|a flamingo;a pig
grey|an elephant;a mouse;ash
"""

CARDS = """\
What are the days of the week?;Name the days of the week.;Which days are in a week?;List the days of the week.;*Say the days of the week.|The days of the week are Monday, Tuesday, <Wednesday>, Thursday, Friday, Saturday and Sunday.
What are the months of the year?;Name the months.;Name the twelve months.;List the months of the year.;*Say the months of the year.|The months are January, February, March, April, May, June, July, <August>, September, October, November and December.
What are the seasons?;Name the four seasons.;Which seasons are there?;List the seasons.;*Say the names of the seasons.|The four seasons are spring, summer, <autumn> and winter.
What is the first day of the week?;Which day is first in the week?;*Which day begins the week?|The week begins on <Monday>, or on Sunday in some countries.
Which days are the weekend?;What is the weekend?;Name the days of the weekend.;*When is the weekend?|The weekend is <Saturday> and Sunday.
Which is the shortest month?;What is the shortest month?;*Name the shortest month.|The shortest month is <February>.
Name the first month.;Does the year begin with January?;*With which month does the year begin?|The first month of the year is <January>.
Which month is the last?;What is the last month of the year?;*With which month does the year end?|The last month of the year is <December>.
Which months have 30 days?;Name the months with 30 days.;*Which months are 30 days long?|April, June, <September> and November have 30 days.
When is Christmas?;On which date is Christmas?;What day is Christmas?;*What is the date of Christmas?|Christmas is on <25 December>.
When is New Year's Day?;On which date is New Year's Day?;*What is the date of New Year's Day?|New Year's Day is on <1 January>.
When is Halloween?;On which date is Halloween?;*What is the date of Halloween?|Halloween is on <31 October>.
What is a leap year?;How long is a leap year?;Explain leap years.;*What does leap year mean?|A leap year has <366> days: February gets a 29th day.
How often is there a leap year?;How often do leap years come?;*When do leap years come?|A leap year comes about every <four> years.
What is the hottest season?;Which season is the hottest?;Which season is the warmest?;*Name the hottest season.|The hottest season is <summer>.
What is the coldest season?;Which season is the coldest?;*Name the coldest season.|The coldest season is <winter>.
In which season do leaves fall?;When do leaves fall from the trees?;*Which season makes the leaves fall?|The leaves fall in <autumn>, which Americans call fall.
In which season do flowers begin to bloom?;When do flowers begin to bloom?;*Which season makes the flowers bloom?|Flowers begin to bloom in <spring>.
What are the colours of the rainbow?;Name the colours of the rainbow.;What are the colors of the rainbow?;Which colours are in a rainbow?;*List the colours of the rainbow.|The colours of the rainbow are red, orange, yellow, green, blue, <indigo> and violet.
What are the primary colours?;Name the primary colours.;What are the primary colors?;*List the primary colours.|The primary colours of paint are <red>, yellow and blue.
What are the colours of a traffic light?;Name the colours of a traffic light.;*List the colours of a traffic light.|A traffic light is <red>, yellow and green.
What are the vowels?;Name the vowels.;Which letters are vowels?;*List the vowels.|The vowels are a, <e>, i, o and u.
What is the alphabet?;Say the alphabet.;Write the alphabet.;Recite the alphabet.;*List the letters of the alphabet.|a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z.|d, e, f
What is the first letter of the alphabet?;Which letter is the first?;*Name the first letter of the alphabet.|The first letter of the alphabet is <A>.
What is the last letter of the alphabet?;Which letter is the last?;*Name the last letter of the alphabet.|The last letter of the alphabet is <Z>.
What are the five senses?;Name the five senses.;Which senses do we have?;*List the five senses.|The five senses are sight, hearing, smell, taste and <touch>.
What is a noun?;Explain what a noun is.;*Define the word noun.|A noun is a <word> for a person, a place or a thing.
What is a verb?;Explain what a verb is.;*Define the word verb.|A verb is a <word> for what somebody does or is.
What is an adjective?;Explain what an adjective is.;*Define the word adjective.|An adjective is a <word> that describes a noun.
What is a synonym?;Explain what a synonym is.;*Define the word synonym.|A synonym is a word with the <same> meaning as another.
What is an opposite?;What is an antonym?;*Define the word antonym.|An antonym is a word with the <opposite> meaning.
"""  # noqa: E501
