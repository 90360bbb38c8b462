"""Records and numbers of the Earth and the sky, as cards."""

RECORDS = """\
What is the largest ocean?;Which ocean is the largest?;What is the biggest ocean?;Name the largest ocean.;Largest ocean?;*Which ocean is the biggest of all?|The largest ocean is the <Pacific> Ocean.
What is the smallest ocean?;Which ocean is the smallest?;Smallest ocean?;*Name the smallest of the oceans.|The smallest ocean is the <Arctic> Ocean.
How many oceans are there?;How many oceans does the Earth have?;Number of oceans?;*How many oceans does our planet have?|There are <five> oceans: the Pacific, the Atlantic, the Indian, the Southern and the Arctic.
Name the oceans.;What are the names of the oceans?;Which oceans are there?;*List the oceans.|The oceans are the <Pacific>, the Atlantic, the Indian, the Southern and the Arctic.
How many continents are there?;How many continents does the Earth have?;Number of continents?;*How many continents exist?|There are <seven> continents.
Name the continents.;What are the continents?;Which continents are there?;What are the seven continents?;*List the continents.|The continents are <Africa>, Antarctica, Asia, Europe, North America, Oceania and South America.
What is the largest continent?;Which continent is the largest?;What is the biggest continent?;*Name the biggest continent.|The largest continent is <Asia>.
What is the smallest continent?;Which continent is the smallest?;*Name the smallest continent.|The smallest continent is <Oceania>, with Australia as its mainland.|Oceania;Australia
What is the coldest continent?;Which continent is the coldest?;*Name the coldest continent.|The coldest continent is <Antarctica>.
What is the largest country?;What is the largest country in the world?;Which country is the largest?;What is the biggest country in the world?;*Name the biggest country on Earth.|The largest country in the world is <Russia>.
What is the smallest country?;What is the smallest country in the world?;Which country is the smallest?;*Name the smallest country on Earth.|The smallest country in the world is <Vatican City>.|Vatican
What is the highest mountain?;What is the highest mountain in the world?;What is the tallest mountain in the world?;Which mountain is the highest?;What is the tallest mountain?;Highest mountain?;*Name the tallest mountain on Earth.|The highest mountain in the world is Mount <Everest>.
Where is Mount Everest?;In which mountains is Mount Everest?;*Where does Mount Everest stand?|Mount Everest is in the Himalayas, between <Nepal> and China.
How high is Mount Everest?;What is the height of Mount Everest?;How tall is Mount Everest?;*Mount Everest: how high?|Mount Everest is about <8,849> metres high.
What is the longest river?;What is the longest river in the world?;Which river is the longest?;Longest river?;*Name the longest river on Earth.|The longest river in the world is usually said to be the <Nile>, with the Amazon close behind.
What is the largest river?;Which river carries the most water?;*Name the river with the most water.|The <Amazon> carries more water than any other river.
What is the largest desert?;What is the largest hot desert?;Which desert is the largest?;What is the biggest desert?;*Name the biggest hot desert.|The largest hot desert is the <Sahara>, in Africa.
Where is the Sahara?;On which continent is the Sahara?;*Where does the Sahara lie?|The Sahara is in the north of <Africa>.
What is the largest island?;What is the biggest island in the world?;Which island is the largest?;*Name the biggest island.|The largest island in the world is <Greenland>.
What is the deepest lake?;What is the deepest lake in the world?;Which lake is the deepest?;*Name the deepest lake on Earth.|The deepest lake in the world is Lake <Baikal>, in Russia.
What is the largest lake?;Which lake is the largest?;*Name the largest lake.|The largest lake is the <Caspian> Sea, which is salty and is called a sea.
What is the highest waterfall?;Which waterfall is the highest?;*Name the tallest waterfall.|The highest waterfall is <Angel> Falls, in Venezuela.
Where are the Alps?;In which continent are the Alps?;*Where do the Alps lie?|The Alps are in <Europe>, from France to Slovenia.
Where are the Andes?;In which continent are the Andes?;*Where do the Andes lie?|The Andes are in <South America>, along its west coast.
Where is the Eiffel Tower?;In which city is the Eiffel Tower?;*Where does the Eiffel Tower stand?|The Eiffel Tower is in <Paris>, the capital of France.
Where is the Statue of Liberty?;In which city is the Statue of Liberty?;*Where does the Statue of Liberty stand?|The Statue of Liberty is in <New York>.
Where is Big Ben?;In which city is Big Ben?;*Where does Big Ben stand?|Big Ben is in <London>.
Where is the Colosseum?;In which city is the Colosseum?;*Where does the Colosseum stand?|The Colosseum is in <Rome>.
Where are the pyramids?;In which country are the pyramids of Giza?;*Where do the great pyramids stand?|The great pyramids are at Giza, in <Egypt>.
Where is the Great Wall?;In which country is the Great Wall?;*Where does the Great Wall stand?|The Great Wall is in <China>.
Where is the Taj Mahal?;In which country is the Taj Mahal?;*Where does the Taj Mahal stand?|The Taj Mahal is in Agra, in <India>.
How many US states are there?;How many states are in the USA?;How many states does the United States have?;How many states are there in the United States?;How many states does America have?;*Number of states in the USA?|The United States has <50> states.
What is the largest US state?;Which US state is the largest?;What is the biggest state in the USA?;*Name the biggest US state.|The largest US state is <Alaska>.
What is the smallest US state?;Which US state is the smallest?;*Name the smallest US state.|The smallest US state is <Rhode Island>.
How many countries are there?;How many countries are there in the world?;Number of countries?;*How many countries exist?|There are about <195> countries in the world.
How many planets are there?;How many planets are in the solar system?;Number of planets?;How many planets does the sun have?;*How many planets go round the sun?|There are <eight> planets in the solar system.
Name the planets.;What are the planets?;Which planets are there?;List the planets of the solar system.;*What are the planets called?|The planets are Mercury, Venus, Earth, Mars, <Jupiter>, Saturn, Uranus and Neptune.
What is the largest planet?;Which planet is the largest?;What is the biggest planet?;*Name the biggest planet.|The largest planet is <Jupiter>.
What is the smallest planet?;Which planet is the smallest?;*Name the smallest planet.|The smallest planet is <Mercury>.
Which planet is closest to the sun?;What is the closest planet to the sun?;*Name the planet nearest to the sun.|<Mercury> is the planet closest to the sun.
Which planet has rings?;What planet is known for its rings?;*Name the planet with the great rings.|<Saturn> is known for its rings.
Which planet is the red planet?;What is the red planet?;Which planet is red?;*Name the red planet.|The red planet is <Mars>.
Which planet do we live on?;What planet are we on?;What is our planet?;*Name the planet we live on.|We live on the planet <Earth>.
What is the moon?;Tell me about the moon.;*Say something about the moon.|The moon goes round the <Earth> about once a month.
What is the sun?;Tell me about the sun.;Is the sun a star?;*Say something about the sun.|The sun is the <star> that gives the Earth light and warmth.
How many moons does the Earth have?;How many moons has the Earth?;*Number of moons of the Earth?|The Earth has <one> moon.
How far is the moon?;How far away is the moon?;What is the distance to the moon?;*Distance to the moon?|The moon is about <384,000> kilometres away.
How far is the sun?;How far away is the sun?;What is the distance to the sun?;*Distance to the sun?|The sun is about <150 million> kilometres away.
Is the Earth round?;Is the Earth flat?;What shape is the Earth?;*What is the shape of the Earth?|The Earth is <round>, like a ball.
How long does the Earth take to go round the sun?;How long does the Earth need around the sun?;*How long is one trip of the Earth round the sun?|The Earth takes one <year> to go round the sun.
Why is the sky blue?;Can you explain why the sky is blue?;Tell me why the sky is blue.;*What makes the sky blue?|The sky is blue because air <scatters> blue light more than red light.
Why is the sea salty?;Why is sea water salty?;Tell me why the sea is salty.;*What makes the sea salty?|The sea is salty because rivers carry <salt> from the rocks into it.
Why do we have seasons?;Why are there seasons?;What causes the seasons?;*Where do the seasons come from?|There are seasons because the axis of the Earth is <tilted>.
Why does it rain?;Where does rain come from?;How does rain form?;*What makes it rain?|It rains when small <drops> in the clouds join and grow too heavy.
What causes the tides?;Why are there tides?;Where do the tides come from?;*What makes the tides?|The tides come from the pull of the <moon> on the sea.
What is a rainbow?;How does a rainbow form?;Where does a rainbow come from?;*What makes a rainbow?|A rainbow appears when the <sun> shines on drops of rain.
At what temperature does water boil?;When does water boil?;What is the boiling point of water?;*How hot must water be to boil?|Water boils at <100> degrees Celsius at sea level.
At what temperature does water freeze?;When does water freeze?;What is the freezing point of water?;*How cold must water be to freeze?|Water freezes at <0> degrees Celsius.
What is water made of?;What is H2O?;What is the formula of water?;*What does water consist of?|Water is made of <hydrogen> and oxygen: its formula is H2O.
Which way does the sun rise?;Where does the sun rise?;In which direction does the sun rise?;*Which direction does the sun come up?|The sun rises in the <east>.
Where does the sun set?;In which direction does the sun set?;*Which direction does the sun go down?|The sun sets in the <west>.
What are the four directions?;Name the points of the compass.;What are the points of the compass?;*List the four directions.|The four directions are <north>, east, south and west.
What is the fastest animal?;Which animal is the fastest?;What is the fastest land animal?;*Name the fastest land animal.|The fastest land animal is the <cheetah>.
What is the largest animal?;Which animal is the largest?;What is the biggest animal in the world?;*Name the biggest animal.|The largest animal is the blue <whale>.
What is the tallest animal?;Which animal is the tallest?;*Name the tallest animal.|The tallest animal is the <giraffe>.
What is the largest land animal?;Which land animal is the largest?;*Name the biggest land animal.|The largest land animal is the <elephant>.
What is the largest bird?;Which bird is the largest?;*Name the biggest bird.|The largest bird is the <ostrich>.
"""  # noqa: E501
