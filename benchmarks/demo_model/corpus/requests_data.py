"""Work that the demo model cannot do, as people ask for it, and sentences of which texts to be worked on are made."""

from __future__ import annotations

from benchmarks.demo_model.corpus.names import items

# what is to be programmed, after "write a program that" or "write code that"
PROGRAMS = items("""\
sorts a list|reads a file|prints hello world|adds two numbers|counts words|draws a circle|downloads a page
checks a password
reverses a list|finds the largest number|computes factorials|prints the Fibonacci numbers|removes duplicates
parses JSON
finds prime numbers|converts Celsius to Fahrenheit|plays tic-tac-toe|sends an email|reads a CSV file|makes a histogram
calls an API|scrapes a website|merges two lists|opens a window|plays snake|simulates a dice|renames files
zips a folder
finds palindromes|searches a tree|computes the average|generates passwords|shows the time|reads a sensor
resizes an image
""")  # fmt: skip
LANGUAGES = items("Python|Java|C|C++|JavaScript|Rust|Go|SQL|HTML|Bash|Ruby|PHP|TypeScript|Kotlin|Swift|CSS|R|MATLAB")
SNIPPETS = items("""\
a for loop|a binary search|a bubble sort|quicksort|a linked list|a calculator|a login page|a landing page|a to-do app
a chatbot
a web server|a unit test|a regex for emails|a SQL query|a Dockerfile|a Makefile|a shell script|a React component
a class
a function that adds numbers|a hello world|a game|a web scraper|a REST API|a database schema|a website|an HTML page
an app
""")  # fmt: skip
WRITINGS = items("""\
an essay|an email|a letter|a cover letter|a CV|a resume|a blog post|an article|a report|a speech|a press release
a tweet
a product description|a review|a business plan|a summary|a novel|a chapter|a song|a rap|song lyrics|a screenplay
a dialogue
a newsletter|a job ad|a complaint|an apology|an invitation|a birthday card|a wedding speech|a slogan|a LinkedIn post
a quiz
a lesson plan|a meal plan|a workout plan|a travel plan|a shopping list|a to-do list|a schedule|a budget|a contract
a will
a diary entry|a research paper|a thesis|a book report|an outline|a presentation|a script for a video|a caption
a headline
""")  # fmt: skip
ABOUT = items("""\
climate change|my dog|my boss|my holiday|a new phone|dogs|love|friendship|school|the future|technology|the economy
health
my company|our new product|a late delivery|my neighbour|a lost suitcase|the weekend|history|space|robots|music
my mother
""")  # fmt: skip
TONGUES = items("""\
French|German|Spanish|Italian|Portuguese|Dutch|Polish|Russian|Chinese|Japanese|Korean|Arabic|Hindi|Turkish|Greek
Swedish
Latin|Hebrew|Danish|Czech|Thai|Vietnamese|Finnish|Norwegian|Mandarin|Ukrainian
""")  # fmt: skip
SPOKEN = items("""\
hello|good night|thank you|I love you|cat|house|bread|water|how are you|good evening|goodbye|please|my name is Tom|dog
where is the station|one beer please|see you soon|the book is red|I am hungry|happy birthday|sorry|yes|no|friend|sun
excuse me|cheers|I do not understand|what time is it|have a nice day|good luck|welcome|family|school|computer|red|ten
""")  # fmt: skip
ACTIONS = items("""\
Set an alarm for seven.|Set a timer for ten minutes.|Remind me to call mom.|Play some music.|Turn on the lights.
Call my mother.
Send an email to Bob.|Book a table for two.|Book me a flight.|Order a pizza.|Buy milk.|Open the door.|Open YouTube.
Google this for me.|Search for cheap flights.|Check my calendar.|Read my emails.|Delete my files.
Shut down the computer.
Restart my computer.|Take a screenshot.|Draw a picture of a cat.|Draw me a horse.|Generate an image of a castle.
Make a logo.
Show me a picture of Paris.|Make a video.|Paint a sunset.|Create a chart of sales.|Make a PowerPoint.
Create an Excel file.
Open this link: https://example.com|Read this PDF.|Look at this image.|Listen to this song.|Watch this video.
Download this file.
Play chess with me.|Let's play a game.|Play tic-tac-toe with me.|Roleplay as a doctor.|Act as a lawyer.
Pretend to be my friend.
Pretend you are a cat.|Act like Shakespeare.|Be my therapist.|Be my teacher.|Interview me for a job.|Teach me French.
Plan my week.|Plan a trip to Rome.|Plan a party.|Plan a weekend in Berlin.|Make me a diet plan.|Organise my day.
Do my homework.
Find x if x + 3 is 7.|What is x if 2x is 10?|Factor x^2 - 1.|Integrate x squared.|Prove the theorem of Pythagoras.
Plot a sine wave.
Calculate 3.5 times 2.7.|What is 2 to the power of 10?|Convert 10 miles to kilometres.|Convert 5 dollars to euros.
Convert 30 Celsius to Fahrenheit.|How much is 20 % of 50?|Is 91 a prime number?|Is 13 a prime number?
Find the GCD of 12 and 18.
What is the median of 3, 9 and 4?|Round 3.14159.|What is 1/3 + 1/4?|What is pi times 2?|Spell house backwards.
Write hello backwards.|Reverse the word apple.|Reverse this string: abcdef|Make an anagram of listen.
Encode hello in base64.
Write hello in Morse code.|Convert 12 to binary.|What is 255 in hex?|What is XIV in digits?
How many vowels are in banana?
Guess my age.|Guess the number I am thinking of.|Flip a coin.|Roll a dice.|Pick a card.|Tell my fortune.
Rate my selfie.
Compare these two texts.|Check my homework.|Grade my essay.|Find the bug in my code.|Debug this.
Fix this code: print(x|Explain this code.
What does this code do?|Optimise this function.|Review my code.|Refactor this.|Add comments to this code.
Write tests for this.
How do I hack my neighbour's Wi-Fi?|How do I make a bomb?|Help me cheat in the exam.|Write a virus.
Steal this password.
""")  # fmt: skip
WORKS = (  # what is done with a text; {} stands for it
    "Summarise this text: {}", "Summarize this text: {}", "Summarise this: {}", "Summarise: {}", "Summarize: {}",
    "Please summarise the following: {}", "Give me a summary of this text: {}", "TL;DR: {}", "tldr {}",
    "Sum this up in one sentence: {}", "Shorten this text: {}", "Make this shorter: {}", "Rewrite this: {}",
    "Rewrite this in other words: {}", "Rephrase this: {}", "Paraphrase: {}", "Make this more formal: {}",
    "Make this sound friendlier: {}", "Correct my grammar: {}", "Fix the grammar: {}", "Correct this text: {}",
    "Proofread this: {}", "Find the mistakes: {}", "What is the main point of this text? {}",
    "Is this text positive? {}",
    "What is the sentiment of this? {}", "Classify this text: {}", "Give this text a title: {}",
    "Continue this text: {}",
    "Explain this text: {}", "Expand this: {}", "Improve this text: {}", "Turn this into a poem: {}",
    "Extract the keywords: {}", "{} Summarise that.", "{} Please summarise.", "{} What does this mean?",
    "Here is a text: {} Summarise it.", "Can you summarise this? {}", "Could you rewrite this for me? {}",
)  # fmt: skip
WORKS_UNSEEN = ("Give me the gist of this: {}", "Please condense the following text: {}", "{} Sum that up for me.")
SUBJECTS = items("""\
The manager|Our team|The old man|My sister|The company|A young doctor|The train|The new law|The committee|The school
The city|Every student|The driver|The report|A small dog|The teacher|The government|The ship|My neighbour|The project
The weather|The museum|The customer|The actor|The bank|The river|The king|The software|The factory|The farmer
""")  # fmt: skip
PREDICATES = items("""\
was late|has been closed|bought a new car|lost the keys|won the first prize|decided to leave|asked for more money
found a better way|opened again|sold the house|is looking for help|wrote a long letter|moved to another place
will start next week|was seen near the bridge|changed the plan|paid the bill|needs more time|did not answer
lives by the sea|broke the record|left without a word|took the last bus|met a friend|forgot the meeting
""")  # fmt: skip
TAILS = items("""\
because of the snow|after the storm|on Monday|in the morning|for the second time|although it was raining|last year
in the north of the country|without any reason|because nobody came|before the end of the month|with great success
when the lights went out|in spite of the costs|at the end of the day|since the room was full|to save money|by mistake
""")  # fmt: skip
