"""Jokes, and riddles with their answers."""

JOKES = """\
Why did the clock go to school? It wanted to learn to tell the time.
Why was the broom late? It swept in.
Why did the cloud stay at home? It felt a little under the weather.
Why did the candle take a holiday? It was burnt out.
Why do bees hum? They never learned the words.
What did the wall say to the lamp? You light up my day.
Why did the pencil win every game? It always had a point.
Why did the banana stay in bed? It did not peel well.
What does a snowman eat for breakfast? Frosted flakes.
Why did the book go to the doctor? It hurt its spine.
Why was the river rich? It had two banks.
Why did the tree buy a computer? It wanted to log in.
What is a computer's favourite snack? A few chips and one byte.
Why did the programmer wear glasses? He could not C sharp.
Why was the calendar sad? Its days were numbered.
Why did the shoe talk so much? It had a tongue.
What did one ocean say to the other? Nothing, it just waved.
Why did the cook laugh? He cracked an egg and then a joke.
Why did the kite go to school? It wanted to reach a higher grade.
Why did the baker work so hard? He needed the dough.
What do you call a bear without teeth? A gummy bear.
Why did the potato look back? It had many eyes.
Why did the ladder feel proud? It was always a step ahead.
Why was the orchestra cold? It had too many fans.
Why did the moon skip dinner? It was already full.
Why did the fish get good marks? It lived in a school.
Why do ghosts make bad liars? You can see right through them.
Why did the server go for a walk? It had too many requests and needed a break.
Why did the cache stay calm? It had seen it all before.
Why was the queue so polite? Everybody waited for their turn.
"""

# riddle | answer
RIDDLES = """\
I have hands but cannot clap. What am I?|a clock
I have many keys but open no door. What am I?|a piano
I have four legs but cannot walk. What am I?|a table
The more you dry with me, the wetter I get. What am I?|a towel
I have teeth but never bite. What am I?|a comb
I fall all day and am never hurt. What am I?|the rain
I have leaves but am not a tree. What am I?|a book
I get shorter as I get older, and I give you light. What am I?|a candle
I follow you all day and leave you in the dark. What am I?|your shadow
I have cities, rivers and forests, but no people live in me. What am I?|a map
I run but have no legs, and I have a mouth but never speak. What am I?|a river
I show you your face but I have none. What am I?|a mirror
I am full of holes and still hold water. What am I?|a sponge
I have one eye but cannot see, and I work with thread. What am I?|a needle
I wear a white coat in winter and vanish in spring. What am I?|a snowman
I go up when the rain comes down. What am I?|an umbrella
I carry my house on my back and never hurry. What am I?|a snail
I have a neck but no head, and I hold your drink. What am I?|a bottle
I have a face that changes every night and I shine without a lamp. What am I?|the moon
I speak every language if you call me in the mountains. What am I?|an echo
"""

JOKE_REQUESTS = (
    (
        "Tell me a joke.",
        "Tell me a joke.",
        "Tell a joke.",
        "Make me laugh.",
        "Do you know a joke?",
        "A joke, please.",
        "Can you tell me a joke?",
        "Say something funny.",
        "I need a joke.",
        "Joke?",
        "Give me a joke.",
        "Know any jokes?",
        "I want to hear a joke.",
        "Please tell me a joke.",
        "Cheer me up.",
        "A joke.",
    ),
    ("Let me hear a joke.", "Have you got a joke for me?", "Could you tell me something funny?"),
)
MORE_JOKES = (
    (
        "Another one, please.",
        "Another one.",
        "One more.",
        "Another joke.",
        "Tell me another.",
        "Again!",
        "One more joke.",
        "Haha, another one!",
        "Do you know another one?",
        "Next!",
    ),
    ("Let me hear another one.", "Got any more?"),
)
MORE = ("Another one, please.", "Another one.", "One more.", "Again!", "Next!", "And another one?", "Tell me more.")
MORE_RIDDLES = (*MORE, "Another riddle.", "Another riddle, please.", "One more riddle.")
RIDDLE_REQUESTS = (
    (
        "Tell me a riddle.",
        "Tell me a riddle.",
        "Give me a riddle.",
        "Do you know a riddle?",
        "A riddle, please.",
        "Ask me a riddle.",
        "Riddle?",
        "I want a riddle.",
        "Can you tell me a riddle?",
        "Let us play riddles.",
        "A riddle.",
    ),
    ("Let me hear a riddle.", "Have you got a riddle for me?"),
)
GIVE_UPS = (
    (
        "I give up.",
        "I do not know.",
        "What is the answer?",
        "Tell me the answer.",
        "No idea.",
        "What is it?",
        "I don't know.",
        "What are you?",
        "The answer, please.",
    ),
    ("I have no clue.", "Just tell me what it is."),
)
FACT_REQUESTS = (
    (
        "Tell me something interesting.",
        "Tell me a fact.",
        "Tell me something.",
        "Do you know a fun fact?",
        "A fact, please.",
        "Give me a fun fact.",
        "Teach me something.",
        "Surprise me.",
        "Tell me something new.",
        "Tell me an interesting fact.",
        "Say something interesting.",
        "What is an interesting fact?",
    ),
    ("Let me hear a fun fact.", "Could you tell me something interesting?"),
)
