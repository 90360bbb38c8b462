"""Common nouns in a few words. A noun with a dash before it takes no article."""

DEFINITIONS = """\
airplane|a machine with wings that carries people through the air
-air|the mix of gases around the Earth that we breathe
airport|a place where planes take off and land
animal|a living thing that moves, eats and feels
ant|a small insect that lives and works in large groups
apple|a round fruit with crisp flesh that grows on trees
arm|the part of the body between the shoulder and the hand
artist|a person who makes paintings, music or other works of art
baby|a very young child
bakery|a shop where bread and cakes are made and sold
ball|a round thing that people throw, kick or hit in games
banana|a long yellow fruit with a soft inside
bank|a business that keeps and lends money
beach|a strip of sand or stones beside the sea
bear|a large, heavy animal with thick fur
bed|a piece of furniture that people sleep on
bee|a flying insect that makes honey and can sting
bell|a hollow piece of metal that rings when it is hit
bicycle|a vehicle with two wheels that you drive with your feet
bird|an animal with feathers, two wings and a beak
blanket|a thick cloth that keeps you warm in bed
boat|a small vessel that travels on water
book|a set of printed pages held together in a cover
boot|a strong shoe that covers the foot and the ankle
bottle|a container with a narrow neck for liquids
bowl|a deep round dish for soup or fruit
box|a container with flat sides and often a lid
branch|a part of a tree that grows out from the trunk
-bread|a food made of flour, water and yeast, baked in an oven
bridge|a structure that carries a road across a river or a valley
brother|a boy or man who has the same parents as you
brush|a tool with hairs, used for painting or cleaning
building|a structure with walls and a roof, such as a house
bus|a large vehicle that carries many passengers on a road
-butter|a soft yellow food made from cream
butterfly|an insect with four large, often colourful wings
cake|a sweet food baked from flour, eggs, butter and sugar
calendar|a table of the days, weeks and months of a year
camel|a desert animal with one or two humps on its back
camera|a device that takes pictures
candle|a stick of wax with a wick that burns to give light
capital|the city where the government of a country sits
car|a road vehicle with four wheels and an engine
carrot|a long orange root that is eaten as a vegetable
castle|a large old building with thick walls, built for defence
cat|a small furry animal that people keep as a pet
cave|a large natural hole in a hill or under the ground
chair|a seat with a back for one person
-cheese|a food made from milk that has turned solid
chicken|a farm bird that is kept for its eggs and meat
child|a young person who is not yet grown up
-chocolate|a sweet brown food made from cocoa beans
circle|a perfectly round shape
city|a very large town
clock|a device that shows the time
cloud|a mass of tiny drops of water floating in the sky
coat|a warm piece of clothing worn over other clothes
-coffee|a hot, dark drink made from roasted beans
coin|a flat, round piece of metal used as money
compass|an instrument with a needle that points to the north
computer|a machine that stores and works on information
continent|one of the seven great areas of land on Earth
country|an area of land with its own government
cow|a large farm animal that gives milk
crown|a ring of gold that a king or queen wears on the head
cup|a small container with a handle for drinking
dancer|a person who moves to music as an art
daughter|a girl or woman, seen as the child of her parents
day|a period of twenty-four hours
deer|a wild animal with long legs and often antlers
dentist|a doctor who takes care of teeth
desert|a large, dry area of land with few plants
desk|a table for reading, writing or working
diamond|a very hard and clear precious stone
dictionary|a book that explains the meaning of words
doctor|a person who treats people who are ill
dog|an animal that people keep as a pet or to guard things
doll|a toy that looks like a small person
door|a flat piece of wood that opens and closes an entrance
dragon|a large beast of stories that can fly and breathe fire
dream|a series of pictures in the mind during sleep
drum|a round instrument that you hit with sticks or hands
duck|a bird with a broad beak that swims on ponds
ear|the part of the body that hears
egg|a round object in a shell that holds a young bird
elephant|a very large grey animal with a long trunk
engine|a machine that makes a vehicle move
eye|the part of the body that sees
family|a group of parents, children and other relatives
farm|a place where crops are grown and animals are kept
farmer|a person who grows crops or keeps animals
feather|one of the light parts that cover a bird
fence|a barrier of wood or wire around a piece of land
finger|one of the five long parts of the hand
-fire|the heat, light and flames of something that burns
fish|an animal with fins that lives and breathes in water
flag|a piece of cloth with colours that stands for a country
floor|the part of a room that you walk on
-flour|a powder made from grain and used for bread
flower|the colourful part of a plant that makes seeds
-fog|a thick cloud close to the ground
-food|what people and animals eat
foot|the part of the body at the end of the leg
forest|a large area of land covered with trees
fork|a tool with points for eating food
fox|a wild animal with red fur and a bushy tail
friend|a person you know well and like
frog|a small animal with long back legs that jumps and swims
-fruit|the sweet part of a plant that holds its seeds
garden|a piece of land where flowers or vegetables grow
gate|a door in a fence or a wall
ghost|the spirit of a dead person in a story
giraffe|an African animal with a very long neck
-glass|a hard, clear material used for windows and bottles
glove|a piece of clothing for the hand with a place for each finger
goat|a farm animal with horns that gives milk
-gold|a yellow metal of great value
-grass|a common plant with thin green leaves that covers lawns
guitar|a musical instrument with six strings
hammer|a tool with a heavy head for hitting nails
hand|the part of the body at the end of the arm
harbour|a safe place where ships can stay
hat|a piece of clothing for the head
heart|the organ that pumps blood through the body
hill|a piece of high ground that is lower than a mountain
holiday|a time when people rest and need not work
-honey|a sweet food that bees make from flowers
horse|a large animal that people ride
hospital|a building where sick people are treated
hotel|a building where travellers pay to sleep
hour|a period of sixty minutes
house|a building where people live
-ice|water that has frozen solid
insect|a small animal with six legs
island|a piece of land with water all around it
journey|a trip from one place to another
-juice|the liquid that is pressed out of fruit
key|a piece of metal that opens a lock
king|a man who rules a country by birth
kitchen|a room where food is cooked
kite|a light toy that flies in the wind on a string
kitten|a young cat
knife|a tool with a sharp blade for cutting
ladder|two long bars with steps between them for climbing
lake|a large area of water with land all around it
lamp|a device that gives light
language|a system of words that people use to speak and write
leaf|a flat green part of a plant
leg|a part of the body used for standing and walking
lemon|a yellow fruit with a sour taste
letter|a written message, or a sign of the alphabet
library|a place where books are kept and lent
lighthouse|a tower by the sea with a bright lamp that guides ships
-lightning|a bright flash of electricity in the sky
lion|a large wild cat that lives in groups
map|a drawing that shows where places are
market|a place where people buy and sell goods
-metal|a hard material such as iron, gold or copper
-milk|the white liquid with which mammals feed their young
minute|a period of sixty seconds
mirror|a piece of glass in which you see yourself
-money|coins and notes used to buy things
monkey|a clever animal with a long tail that climbs trees
month|one of the twelve parts of a year
mountain|a very high piece of land with steep sides
mouse|a very small animal with a long, thin tail
mouth|the part of the face used for eating and speaking
museum|a building where old or precious things are shown
-music|sounds put together so that they are pleasant to hear
nail|a thin, pointed piece of metal that holds things together
neighbour|a person who lives near you
nest|a home that a bird builds for its eggs
newspaper|sheets of paper with the news of the day
night|the dark time between evening and morning
nose|the part of the face used for smelling
number|a word or sign that says how many
nurse|a person who looks after sick people
ocean|one of the five great seas of the Earth
-oil|a thick liquid that burns or is used for cooking
onion|a round vegetable with many layers and a strong smell
orange|a round, juicy fruit with a thick skin
oven|a closed box that gets hot and bakes food
owl|a bird with large eyes that hunts at night
-paper|thin sheets made from wood for writing and printing
parent|a mother or a father
park|a green area in a town where people walk and play
pen|a tool with ink for writing
pencil|a thin stick of wood with a dark core for writing
penguin|a black and white bird that swims but cannot fly
piano|a large instrument with black and white keys
picture|a painting, a drawing or a photograph
pig|a farm animal with a round body and a flat nose
pilot|a person who flies a plane
planet|a large round body that moves around a star
plant|a living thing that grows in the ground
plate|a flat dish for food
pocket|a small bag that is sewn into clothes
poem|a text in short lines, often with rhymes
poet|a person who writes poems
police officer|a person who sees that laws are obeyed
pond|a small area of still water
potato|a round vegetable that grows under the ground
prince|the son of a king or queen
princess|the daughter of a king or queen
pumpkin|a large, round, orange vegetable
puppy|a young dog
queen|a woman who rules a country by birth
question|words that ask for an answer
rabbit|a small animal with long ears that lives in holes
-rain|water that falls in drops from the clouds
rainbow|an arc of colours in the sky when sun meets rain
restaurant|a place where people pay to eat meals
-rice|the white or brown grains that many people eat daily
ring|a round piece of metal worn on a finger
river|a large stream of water that flows to the sea
road|a hard way on which vehicles travel
robot|a machine that can do work by itself
rocket|a vehicle that flies into space
roof|the cover on top of a building
room|a part of a building with its own walls
root|the part of a plant that grows under the ground
rope|a strong, thick string
rose|a flower with a sweet smell and thorns on its stem
sailor|a person who works on a ship
-salt|a white powder that gives food more taste
-sand|very small grains of stone, found on beaches
school|a place where children learn
scientist|a person who studies how the world works
sea|a large area of salt water
season|one of the four parts of the year
seed|the small part of a plant from which a new one grows
shadow|a dark shape made where light is blocked
shark|a large fish with sharp teeth
sheep|a farm animal that is kept for its wool
ship|a large vessel that travels on the sea
shirt|a piece of clothing for the upper body
shoe|a piece of clothing for the foot
shop|a place where things are sold
sister|a girl or woman who has the same parents as you
-snow|white flakes of ice that fall from the clouds
-soap|what people use with water to wash
son|a boy or man, seen as the child of his parents
song|a piece of music with words to sing
soup|a liquid food of meat or vegetables cooked in water
spider|a small animal with eight legs that spins webs
spoon|a tool with a small bowl for eating soup
square|a shape with four equal sides and four right angles
star|a very large ball of hot gas that shines in the sky
station|a place where trains or buses stop
-steel|a strong metal made from iron
stone|a hard, solid piece of rock
storm|bad weather with strong wind and rain
story|a tale of events, true or made up
street|a road in a town with houses beside it
student|a person who studies at a school or university
-sugar|sweet white grains made from beets or cane
table|a piece of furniture with a flat top and legs
-tea|a drink made by pouring hot water on dried leaves
teacher|a person who helps others to learn
telephone|a device for talking to people far away
tent|a shelter of cloth that campers sleep in
theatre|a building where plays are shown
-thunder|the loud noise that follows lightning
ticket|a piece of paper that lets you travel or enter
tiger|a large wild cat with orange fur and black stripes
-time|what clocks measure in hours and minutes
tooth|one of the hard white things in the mouth for biting
towel|a piece of cloth for drying things
tower|a tall, narrow building
town|a place with many houses, smaller than a city
toy|a thing that children play with
train|a line of carriages that runs on rails
tree|a tall plant with a trunk and branches
triangle|a shape with three sides
umbrella|a cover on a stick that keeps off the rain
valley|low land between hills or mountains
vegetable|a plant, such as a carrot, that is eaten as food
village|a very small town in the country
violin|an instrument with four strings, played with a bow
volcano|a mountain that can throw out hot rock and ash
wall|one of the sides of a room or a building
-water|a clear liquid that falls as rain and fills rivers
week|a period of seven days
whale|a very large mammal that lives in the sea
wheel|a round object that turns so that a vehicle can move
-wind|air that moves
window|an opening in a wall with glass in it
-wood|the hard material that trees are made of
-wool|the soft hair of sheep, used for warm clothes
word|a group of letters with a meaning
writer|a person who writes books or stories
year|a period of twelve months
zebra|an African animal like a horse with black and white stripes
zoo|a place where people can see wild animals
"""
