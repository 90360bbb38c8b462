"""What there is several of: the tables of lists, in the order in which an answer goes through them.

A line is: plural | singular | items. An answer begins anywhere in the row and goes round.
"""

from __future__ import annotations

_TABLE = """\
fruits|fruit|apple;banana;cherry;grape;lemon;melon;orange;peach;pear;plum;strawberry;kiwi
vegetables|vegetable|carrot;potato;onion;tomato;cabbage;spinach;pea;bean;cucumber;pepper;pumpkin;leek
animals|animal|dog;cat;horse;cow;lion;elephant;rabbit;bear;fox;tiger;monkey;sheep
wild animals|wild animal|lion;tiger;bear;wolf;elephant;giraffe;zebra;monkey;fox;deer;leopard;crocodile
farm animals|farm animal|cow;pig;sheep;goat;horse;chicken;duck;goose;donkey;turkey
pets|pet|dog;cat;rabbit;hamster;goldfish;budgie;guinea pig;canary;turtle;mouse
birds|bird|eagle;owl;sparrow;robin;swan;duck;penguin;cuckoo;pigeon;crow;falcon;stork
fish|fish|salmon;trout;tuna;cod;herring;carp;pike;sardine;mackerel;eel
insects|insect|ant;bee;butterfly;beetle;fly;wasp;mosquito;grasshopper;dragonfly;moth
colours|colour|red;blue;green;yellow;orange;purple;pink;brown;black;white;grey
drinks|drink|water;tea;coffee;milk;juice;lemonade;cocoa;wine;beer;soda
foods|food|bread;rice;pasta;soup;cheese;salad;pizza;potatoes;fish;eggs
desserts|dessert|cake;ice cream;pudding;pie;cookies;chocolate;pancakes;jelly;waffles;doughnuts
spices|spice|pepper;cinnamon;ginger;paprika;cumin;nutmeg;saffron;turmeric;vanilla;cloves
sports|sport|football;tennis;basketball;swimming;running;cycling;golf;hockey;volleyball;rugby;skiing;boxing
games|game|chess;checkers;dominoes;cards;darts;hide and seek;tag;marbles;bingo;dice
hobbies|hobby|reading;painting;gardening;cooking;fishing;hiking;dancing;singing;sewing;photography
musical instruments|musical instrument|piano;guitar;violin;oboe;drum;trumpet;tuba;harp;clarinet;organ
trees|tree|oak;pine;birch;maple;willow;beech;apple tree;fir;palm;elm
flowers|flower|rose;tulip;lily;daisy;sunflower;violet;orchid;daffodil;poppy;carnation
clothes|piece of clothing|shirt;trousers;dress;coat;hat;socks;shoes;jacket;skirt;sweater;scarf;gloves
pieces of furniture|piece of furniture|table;chair;bed;sofa;desk;shelf;cupboard;wardrobe;bench;stool
tools|tool|hammer;saw;screwdriver;pliers;wrench;drill;axe;shovel;file;knife
vehicles|vehicle|car;bus;train;bicycle;truck;boat;plane;motorcycle;tram;ship
shapes|shape|circle;square;triangle;rectangle;oval;star;pentagon;hexagon;diamond;heart
languages|language|English;French;German;Spanish;Italian;Chinese;Japanese;Arabic;Russian;Portuguese;Hindi;Dutch
jobs|job|teacher;doctor;nurse;baker;farmer;pilot;engineer;painter;lawyer;writer;cook;driver
parts of the body|part of the body|head;arm;leg;hand;foot;nose;ear;eye;mouth;knee;shoulder;finger
school subjects|school subject|mathematics;history;geography;biology;chemistry;physics;music;art;English;sport
metals|metal|iron;gold;silver;copper;tin;lead;zinc;aluminium;nickel;steel
gemstones|gemstone|diamond;ruby;emerald;sapphire;opal;topaz;amber;pearl;jade;garnet
rooms of a house|room of a house|kitchen;bathroom;bedroom;living room;hall;cellar;attic;study;dining room;garage
things in a kitchen|thing in a kitchen|oven;fridge;pan;pot;knife;fork;spoon;plate;cup;sink
toys|toy|ball;doll;kite;puzzle;teddy bear;toy train;yo-yo;blocks;robot;marbles
feelings|feeling|joy;anger;fear;sadness;love;surprise;pride;envy;hope;shame
boys' names|boy's name|Tom;Ben;Max;Paul;Leo;Sam;Jack;Noah;Adam;Peter
girls' names|girl's name|Anna;Emma;Mia;Lisa;Nora;Clara;Eva;Julia;Maria;Zoe
cities|city|London;Paris;Tokyo;New York;Berlin;Rome;Madrid;Cairo;Sydney;Mumbai;Toronto;Seoul
capitals|capital|London;Paris;Berlin;Madrid;Rome;Tokyo;Cairo;Ottawa;Lima;Vienna;Oslo;Athens
countries|country|France;Germany;Spain;Italy;Japan;Brazil;Canada;India;Egypt;Mexico;China;Kenya
rivers|river|the Nile;the Amazon;the Danube;the Rhine;the Thames;the Mississippi;the Volga;the Ganges;the Congo
mountains|mountain|Mount Everest;K2;Kilimanjaro;Mont Blanc;the Matterhorn;Mount Fuji;Denali;Mount Olympus
islands|island|Greenland;Iceland;Madagascar;Cuba;Sicily;Crete;Jamaica;Malta;Cyprus;Tasmania
oceans|ocean|the Pacific;the Atlantic;the Indian Ocean;the Arctic;the Southern Ocean
continents|continent|Africa;Asia;Europe;North America;South America;Oceania;Antarctica
planets|planet|Mercury;Venus;Earth;Mars;Jupiter;Saturn;Uranus;Neptune
months|month|January;February;March;April;May;June;July;August;September;October;November;December
days of the week|day of the week|Monday;Tuesday;Wednesday;Thursday;Friday;Saturday;Sunday
US states|US state|California;Texas;Florida;New York;Ohio;Virginia;Alaska;Hawaii;Nevada;Oregon;Utah;Maine
programming languages|programming language|Python;Java;C;Rust;Go;JavaScript;Ruby;Swift;Kotlin;Haskell
even numbers|even number|2;4;6;8;10;12;14;16;18;20
odd numbers|odd number|1;3;5;7;9;11;13;15;17;19
prime numbers|prime number|2;3;5;7;11;13;17;19;23;29
letters|letter|A;B;C;D;E;F;G;H;I;J
adjectives|adjective|big;small;red;happy;fast;cold;old;new;soft;bright
verbs|verb|run;eat;sleep;write;read;sing;jump;walk;think;play
nouns|noun|house;tree;book;river;child;table;stone;cloud;song;door
cities in France|city in France|Paris;Lyon;Marseille;Nice;Toulouse;Bordeaux;Lille;Nantes
cities in Germany|city in Germany|Berlin;Hamburg;Munich;Cologne;Frankfurt;Stuttgart;Leipzig;Dresden
cities in Italy|city in Italy|Rome;Milan;Naples;Turin;Venice;Palermo;Bologna;Genoa
cities in Spain|city in Spain|Madrid;Barcelona;Seville;Cordoba;Bilbao;Malaga;Granada;Zaragoza
cities in England|city in England|London;Manchester;Liverpool;Birmingham;Leeds;Bristol;Oxford;York
cities in the USA|city in the USA|New York;Los Angeles;Chicago;Houston;Boston;Seattle;Miami;Denver
cities in Japan|city in Japan|Tokyo;Osaka;Kyoto;Yokohama;Sapporo;Kobe;Fukuoka;Hiroshima
cities in China|city in China|Beijing;Shanghai;Guangzhou;Shenzhen;Wuhan;Chengdu;Tianjin;Nanjing
cities in India|city in India|Delhi;Mumbai;Chennai;Kolkata;Bangalore;Hyderabad;Pune;Jaipur
cities in Brazil|city in Brazil|Rio de Janeiro;Brasilia;Salvador;Fortaleza;Recife;Manaus;Curitiba;Belem
cities in Canada|city in Canada|Toronto;Montreal;Halifax;Ottawa;Calgary;Edmonton;Winnipeg;Quebec City
cities in Australia|city in Australia|Sydney;Melbourne;Cairns;Perth;Adelaide;Canberra;Hobart;Darwin
cities in Poland|city in Poland|Warsaw;Krakow;Lodz;Wroclaw;Poznan;Gdansk;Lublin;Szczecin
cities in Switzerland|city in Switzerland|Zurich;Geneva;Basel;Thun;Lausanne;Lucerne;Lugano;Winterthur
cities in Austria|city in Austria|Vienna;Graz;Linz;Salzburg;Innsbruck;Klagenfurt;Villach;Wels
cities in Mexico|city in Mexico|Mexico City;Guadalajara;Monterrey;Puebla;Tijuana;Toluca;Merida;Leon
countries in Europe|country in Europe|France;Germany;Spain;Italy;Portugal;Poland;Greece;Sweden;Norway;Austria;Ireland;Hungary
countries in Asia|country in Asia|China;Japan;India;Thailand;Vietnam;Nepal;Iran;Iraq;Pakistan;Malaysia;Mongolia;Indonesia
countries in Africa|country in Africa|Egypt;Kenya;Nigeria;Ghana;Morocco;Ethiopia;Senegal;Tanzania;Uganda;Algeria;Angola;Mali
countries in South America|country in South America|Brazil;Argentina;Chile;Peru;Colombia;Ecuador;Bolivia;Uruguay;Paraguay;Venezuela
countries in North America|country in North America|Canada;Mexico;Cuba;Jamaica;Panama;Costa Rica;Guatemala;Honduras;Haiti;Belize
"""  # noqa: E501
NAMES = {  # what else a kind is called
    "colours": ("colors", "color"),
    "clothes": ("items of clothing", "item of clothing"),
    "parts of the body": ("body parts", "body part"),
    "boys' names": ("names for boys", "name for a boy"),
    "girls' names": ("names for girls", "name for a girl"),
    "US states": ("American states", "American state"),
    "capitals": ("capital cities", "capital city"),
    "musical instruments": ("instruments", "instrument"),
    "countries in Europe": ("European countries", "European country"),
    "countries in Asia": ("Asian countries", "Asian country"),
    "countries in Africa": ("African countries", "African country"),
    "countries in South America": ("South American countries", "South American country"),
    "cities in France": ("French cities", "French city"),
    "cities in Germany": ("German cities", "German city"),
    "cities in Italy": ("Italian cities", "Italian city"),
    "cities in Spain": ("Spanish cities", "Spanish city"),
    "cities in the USA": ("American cities", "American city"),
    "rooms of a house": ("rooms", "room"),
    "pieces of furniture": ("furniture items", "furniture item"),
    "gemstones": ("gems", "gem"),
    "jobs": ("professions", "profession"),
    "feelings": ("emotions", "emotion"),
    "wild animals": ("animals of the wild", "animal of the wild"),
    "foods": ("things to eat", "thing to eat"),
    "drinks": ("things to drink", "thing to drink"),
    "prime numbers": ("primes", "prime"),
    "days of the week": ("weekdays", "weekday"),
}
_ROWS = [line.split("|") for line in _TABLE.splitlines()]
SINGULAR = {plural: singular for plural, singular, _ in _ROWS}
ITEMS = {plural: tuple(items.split(";")) for plural, _, items in _ROWS}
ANIMALS = tuple(
    item
    for kind in ("animals", "wild animals", "farm animals", "pets", "birds", "fish", "insects")
    for item in ITEMS[kind]
)
IN_ORDER = ("oceans", "continents", "planets", "months", "days of the week", "even numbers", "odd numbers",
            "prime numbers", "letters")  # answers begin with the first  # fmt: skip
