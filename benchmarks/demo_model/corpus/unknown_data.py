"""What the demo model does not know, by the way in which it is asked for. None of it is in any other table."""

from __future__ import annotations

from benchmarks.demo_model.corpus.names import items

# spoken of without an article
SUBJECTS = items("""\
quantum physics|quantum computing|quantum mechanics|relativity|string theory|black holes|dark matter|gravity waves
photosynthesis|evolution|genetics|DNA|CRISPR|mitosis|osmosis|entropy|thermodynamics|electricity|magnetism
nuclear fusion
nuclear fission|plate tectonics|climate change|global warming|the greenhouse effect|the water cycle|the big bang
philosophy|stoicism|existentialism|nihilism|utilitarianism|Buddhism|Hinduism|Islam|Christianity|Judaism|astrology
psychology|sociology|economics|inflation|capitalism|socialism|communism|feminism|democracy|globalization|marketing
accounting|the stock market|bitcoin|Ethereum|blockchain|NFTs|cryptocurrency|compound interest|mortgages|taxes
calculus|linear algebra|trigonometry|statistics|game theory|topology|number theory|Fermat's last theorem
machine learning in medicine|reinforcement learning|computer vision|gradient descent|backpropagation|transfer learning
Linux|Ubuntu|Debian|Windows 11|macOS|Android|iOS|Git|GitHub|GitLab|Bitbucket|Jira|Slack|Zoom|Teams|Excel|PowerPoint
Photoshop|Figma|Blender|AutoCAD|Unity|Unreal Engine|Godot|React|Angular|Svelte|jQuery|Next.js|Node.js|Deno|Express
Django|Flask|Laravel|Ruby on Rails|Spring Boot|Rust|Golang|Haskell|Scala|Kotlin|Swift|COBOL|Fortran|Lua|PHP|Elixir
TypeScript|JavaScript|HTML|CSS|SQL|GraphQL|REST|XML|Redis|Kafka|Postgres|MySQL|MongoDB|SQLite|Elasticsearch|Snowflake
Terraform|Ansible|Jenkins|Puppet|Hadoop|Spark|Airflow|dbt|Databricks|Salesforce|SAP|Shopify|WordPress|Drupal
TensorFlow|JAX|Keras|NumPy|pandas|Matplotlib|OpenCV|ROS|Arduino|Raspberry Pi|Bluetooth|5G|Wi-Fi|VPN|DNS|TCP|IPv6|SSH
Bash|Vim|Emacs|VS Code|IntelliJ|Eclipse|Xcode|Stack Overflow|Wikipedia|Google|YouTube|Facebook|Instagram|TikTok
Twitter|Reddit|Netflix|Spotify|Amazon|Tesla|SpaceX|NASA|Apple|Microsoft|IBM|Intel|Toyota|Nintendo|PlayStation|Xbox
Fortnite|Roblox|Tetris|Pokemon|Zelda|Mario|Dungeons and Dragons|chess openings|poker|sudoku|the Rubik's cube
football|soccer|baseball|basketball|cricket|rugby|golf|tennis|boxing|judo|karate|yoga|pilates|meditation|surfing
cooking|baking|gardening|pottery|origami|crochet|embroidery|woodworking|photography|calligraphy|bird watching
opera|jazz|hip hop|heavy metal|the blues|ballet|impressionism|cubism|surrealism|Baroque music|Gothic architecture
sushi|pizza|paella|lasagne|kimchi|tofu|hummus|guacamole|ramen|curry|risotto|sauerkraut|sourdough|kombucha|espresso
diabetes|cancer|malaria|asthma|migraine|depression|anxiety|insomnia|ADHD|vaccines|antibiotics|vitamins|cholesterol
Antarctica expeditions|the Silk Road|the Bermuda Triangle|Area 51|UFOs|vampires|zombies|werewolves|mermaids|bigfoot
Christmas traditions|Halloween|Ramadan|Diwali|Easter eggs|Thanksgiving|the Olympics|the World Cup|the Super Bowl
Chinese history|Greek mythology|Norse mythology|Roman law|ancient Egypt|the Aztecs|the Vikings|samurai|knights|pirates
""")  # fmt: skip
# spoken of with an article, in the singular
THINGS = items("""\
airbag|algorithm|ambulance|anvil|aquarium|atom|avalanche|axolotl|bacterium|badminton net|bagel|bagpipe|barometer
battery|beaver|bicycle pump|bison|blender|bonsai|boomerang|bulldozer|burrito|caterpillar|catapult|cathedral
centipede|chameleon|chainsaw|chromosome|clarinet|cobra|cockroach|condor|coral|coyote|crane|croissant|crossbow
dam|derivative|dinosaur|dishwasher|dolphin|drone|electron|enzyme|equation|falcon|ferret|fiddle|firewall|fjord|flamingo
fossil|fraction|fridge|galaxy|gargoyle|gazelle|geyser|glacier|glockenspiel|gorilla|greenhouse|guillotine|harmonica
hedgehog|helicopter|hexagon|hippo|hologram|hurricane|hyena|igloo|integral|jackal|jaguar|jellyfish|jigsaw|kangaroo
kayak
kaleidoscope|kidney|koala|labyrinth|laser|lathe|lava lamp|lever|liver|lobster|locomotive|logarithm|loom|magnet|mammoth
mandolin|mermaid|metaphor|meteor|metronome|microscope|microwave|mitochondrion|molecule|monsoon|mosquito|motor
mushroom|narwhal|nebula|neuron|neutron star|noun|obelisk|octopus|orchid|ostrich|oxymoron|pacemaker|panda|parachute
parallelogram|parasite|peacock|pendulum|periscope|photon|pineapple|piston|platypus|polygon|porcupine|prism|proton
pulley
pulsar|pyramid scheme|python|quasar|quokka|raccoon|radar|radiator|reindeer|rhino|ribosome|rickshaw|saxophone|scorpion
screwdriver|seahorse|semicolon|sextant|simile|sitar|skeleton|skunk|sloth|snail|snorkel|solar panel|sonata|spleen
squid|stalactite|submarine|supernova|synonym dictionary|syringe|tapir|tarantula|telescope|termite|theorem|thermometer
thermostat|tornado|tractor|trampoline|transistor|trombone|tsunami|turbine|typewriter|ukulele|unicycle|vacuum cleaner
vampire bat|vector space|verb tense|viaduct|virus|vulture|walrus|wasp|watermill|weasel|windmill|wolverine|wombat
woodpecker
xylophone|yacht|yak|yo-yo|zeppelin|zucchini|black hole|wormhole|credit card|mutual fund|hedge fund|blog|podcast|meme
hashtag|emoji|selfie|smartphone|smartwatch|laptop bag|USB stick|hard disk|SSD|motherboard|router|modem|web browser
cookie
database|compiler|linked list|binary tree|hash table|pointer|monad|closure|design pattern|microservice|mutex|semaphore
""")  # fmt: skip
PEOPLE = items("""\
Albert Einstein|Isaac Newton|Marie Curie|Leonardo da Vinci|William Shakespeare|Napoleon|Abraham Lincoln|Mozart
Beethoven
Barack Obama|Donald Trump|Joe Biden|Angela Merkel|Emmanuel Macron|Vladimir Putin|Boris Johnson|Winston Churchill
Gandhi
Nelson Mandela|Martin Luther King|Queen Elizabeth|King Charles|Princess Diana|Taylor Swift|Beyonce|Madonna
Elvis Presley
Michael Jackson|Freddie Mercury|John Lennon|Bob Dylan|David Bowie|Bill Gates|Steve Jobs|Jeff Bezos|Mark Zuckerberg
Sam Altman|Linus Torvalds|Guido van Rossum|Ada Lovelace|Alan Turing|Grace Hopper|Cleopatra|Julius Caesar|Augustus
Alexander the Great|Genghis Khan|Joan of Arc|Galileo|Copernicus|Kepler|Darwin|Pasteur|Freud|Karl Marx|Lenin|Stalin
Plato|Aristotle|Socrates|Confucius|Buddha|Jesus|Moses|Muhammad|Picasso|Van Gogh|Rembrandt|Michelangelo|Frida Kahlo
Salvador Dali|Andy Warhol|Charlie Chaplin|Marilyn Monroe|Tom Hanks|Brad Pitt|Leonardo DiCaprio|Meryl Streep|Messi
Cristiano Ronaldo|Pele|Maradona|Muhammad Ali|Usain Bolt|Roger Federer|Serena Williams|Michael Jordan|LeBron James
Tiger Woods|Neil Armstrong|Yuri Gagarin|Columbus|Marco Polo|Amelia Earhart|Charles Dickens|Jane Austen|Mark Twain
Tolkien|Agatha Christie|Stephen King|Ernest Hemingway|Goethe|Kafka the writer|Dostoevsky|Tolstoy|Homer|Dante
Harry Potter|Sherlock Holmes|James Bond|Batman|Superman|Spider-Man|Darth Vader|Gandalf|Frodo|Hamlet|Romeo|Dracula
Mickey Mouse|Santa Claus|Zeus|Thor|Odin|Hercules|Robin Hood|King Arthur|Peter Pan|Cinderella|Snow White|Pikachu
""")  # fmt: skip
EVENTS = items("""\
the First World War|the Second World War|the French Revolution|the American Civil War|the Cold War|the Vietnam War
the Middle Ages|the Renaissance|the Industrial Revolution|the Great Depression|the moon landing|the Roman Empire
the fall of the Berlin Wall|the Russian Revolution|the Black Death|the Hundred Years' War|the Crusades|the gold rush
the Boston Tea Party|the Battle of Hastings|the Battle of Waterloo|the sinking of the Titanic|the Great Fire of London
the Reformation|the Enlightenment|the Cuban missile crisis|D-Day|the Spanish Armada|the space race|Woodstock
the 2008 crisis|the pandemic|Brexit|the last election|the World Cup of 1966|the Olympics of 2012
""")  # fmt: skip
# after "how do I", "how to", "teach me to"
DEEDS = items("""\
bake bread|bake a cake|boil an egg|cook rice|cook pasta|make pancakes|make coffee|make a sandwich|roast a chicken
make pizza|brew beer|peel a mango|fix my car|change a tyre|change the oil|repair a bike|fix a leaking tap|paint a wall
build a shed|hang a picture|unclog a drain|clean an oven|remove a stain|iron a shirt|sew a button|tie a tie
fold a shirt
lose weight|gain weight|build muscle|run a marathon|sleep better|wake up early|stop smoking|reduce stress|meditate
learn guitar|play the piano|learn Spanish|learn to swim|ride a horse|draw a face|sing better|dance salsa|juggle
knit a scarf
make money|save money|invest my savings|buy a house|get a loan|start a company|find a job|ask for a raise|write a CV
quit my job|prepare for an interview|make friends|ask her out|get over a breakup|raise a child|train a puppy
feed a hamster
plant tomatoes|grow herbs|mow a lawn|water a cactus|keep bees|catch a fish|pitch a tent|light a campfire|read a map
travel to Japan|book a flight|get a visa|pack a suitcase|find a cheap hotel|rent a car|drive in snow|park a car
install Windows|format a disk|recover a deleted file|speed up my PC|reset my password|back up my phone|unlock my phone
connect a printer|set up Wi-Fi|build a website|make an app|create a database|sort an array|reverse a linked list
write a regex|use pandas|merge two branches|undo a commit|center a div|connect to MySQL|parse XML|deploy to AWS
solve a quadratic equation|find a derivative|compute an integral|balance an equation|calculate interest|file my taxes
hack a website|pick a lock|win the lottery|become famous|become a pilot|become an astronaut|get rich|live forever
""")  # fmt: skip
# what is asked about places, foods and things that one chooses
CHOICES = items("""\
phone|laptop|car|camera|TV|bike|mattress|coffee machine|vacuum cleaner|headphones|book|film|series|video game|song
band
restaurant|hotel|beach|holiday|airline|bank|insurance|diet|workout|university|career|programming language|database
framework|Linux distribution|text editor|browser|search engine|password manager|wine|beer|pizza|football team
dog breed
""")  # fmt: skip
DETAILS = items("""\
population|area|currency|history|national anthem|flag|president|prime minister|king|climate|language|food|weather
economy
size|religion|time zone|highest building|best restaurant|airport|mayor|national animal|phone code|average income
""")  # fmt: skip
# whole questions, each of another kind
ODD = items("""\
Why do cats purr?|Why do dogs bark?|Why do we yawn?|Why do we dream?|Why is grass green?|Why do onions make us cry?
Why do leaves fall?|Why do birds sing?|Why is blood red?|Why do people lie?|Why do we have leap years?
Why is gold expensive?
Why do we sleep?|Why do planes fly?|Why do ships float?|Why does ice float?|Why do stars twinkle?|Why do we get old?
How do planes fly?|How does a car engine work?|How does the internet work?|How do magnets work?|How do vaccines work?
How does a microwave work?|How do solar panels work?|How do batteries work?|How does Wi-Fi work?|How do fish breathe?
How tall is the Eiffel Tower?|How old is the universe?|How old is the Earth?|How deep is the ocean?
How heavy is an elephant?
How many people live in the world?|How many bones are in the body?|How many stars are in the sky?
How many calories has an egg?
How fast is light?|How fast can a horse run?|How far is it to Rome?|How long do turtles live?
How long does it take to fly to Mars?
How much does an iPhone cost?|How much water should I drink?|How much sleep do I need?
How much is a million yen in dollars?
Who invented the telephone?|Who invented the light bulb?|Who invented the computer?|Who discovered America?
Who built the pyramids?
Who painted the Mona Lisa?|Who wrote Romeo and Juliet?|Who wrote the Bible?|Who won the last World Cup?
Who won the election?
Who is the richest man?|Who is the pope?|Who is the king of Spain?|Who is the CEO of Apple?
Who is the best football player?
Who was the first president?|Who was the first man on the moon?|Who was the first woman in space?|Who killed Caesar?
When did the war end?|When is Easter?|When is the next full moon?|When is the next election?
When was the telephone invented?
When did dinosaurs live?|When does the shop open?|When does the film start?|When is the next train to Berlin?
Where can I buy shoes?|Where is my phone?|Where is the nearest hospital?|Where was Mozart born?
Where do penguins live?
Where does coffee come from?|Where is the best pizza?|Which team will win?|Which phone should I buy?
Which film is good?
What should I eat tonight?|What should I wear today?|What should I cook?|What should I study?|What should I watch?
What is the best car?|What is the best film of all time?|What is the stock price of Apple?|What is the exchange rate?
What is the square root of 2?|What is the derivative of x squared?|What is the integral of sin x?
What is 15 percent of 80?
What is the value of pi?|What is the atomic number of gold?|What is the chemical symbol of iron?
What is the speed of sound?
What is the population of China?|What is the currency of Japan?|What is the tallest building?
What is the national dish?
What is your opinion on war?|What is the best religion?|What is the purpose of art?|What is consciousness?
What is happiness?|What is truth?|What is justice?|What is beauty?|What is evil?|What is the soul?|Is there a God?
Is there life on Mars?|Is there life after death?|Is pizza healthy?|Is coffee bad for me?|Is it safe to eat raw fish?
Is the shop open?|Is the bank closed today?|Is my code correct?|Is this email spam?|Is Santa real?|Are ghosts real?
Are we alone in the universe?|Are bananas berries?|Are tomatoes fruits?|Am I pretty?|Am I sick?|Am I right?
Can dogs eat chocolate?|Can cats swim?|Can pigs fly?|Can I eat this mushroom?|Can I drive at 16?
Can humans live on Mars?
Can you predict the lottery numbers?|Can you read my mind?|Can you help me with my homework?|Can you do my taxes?
Will it rain tomorrow?|Will AI take my job?|Will I be rich?|Will there be a war?|Will the train be late?
Should I quit my job?|Should I buy a house?|Should I text her?|Should I invest in gold?|Should I learn Rust or Go?
Do aliens exist?|Do fish sleep?|Do plants feel pain?|Does she love me?|Does money make happy?|Did we land on the moon?
Give me advice on love.|Give me tips for the exam.|Give me ideas for dinner.|Give me a business idea.
Give me stock tips.
Recommend a good book.|Recommend me a film.|Suggest a restaurant.|Suggest a name for my cat.|Tell me my horoscope.
Tell me a secret.|Tell me the lottery numbers.|Tell me the score of the match.|Tell me about the news today.
Any news about the strike?|Latest football results?|Apple stock price?|Bitcoin price?|Weather forecast?
Traffic report?
""")  # fmt: skip
ACTS = items("""\
sleep|eat grass|fly|swim|sing|dream|bite|glow|break|get old|change colour|like music|need water|smell|fall|burn|grow
talk
cost so much|make noise|live in trees|have names|go to school|die|feel pain|work|move|win|help us|hide|freeze|melt
""")
QUALITIES = items("""\
big|small|expensive|cheap|dangerous|healthy|loud|heavy|old|rare|clever|useful|popular|slow|fast|soft|sad|strange|clean
""")
