"""How stories and poems are asked for, and what is asked about them."""

from benchmarks.demo_model.corpus.base import Phrasings

ANY_STORY = Phrasings(
    seen=(
        "Tell me a story.",
        "Tell me a story.",
        "Tell a story.",
        "Can you tell me a story?",
        "Write a story.",
        "Write me a short story.",
        "A story, please.",
        "A story.",
        "I want to hear a story.",
        "Do you know a story?",
        "Make up a story.",
        "Please tell me a bedtime story.",
        "Tell my child a story.",
    ),
    unseen=("Let me hear a story.", "Could you write a little story for me?", "I would love to hear a story."),
)
STORY = Phrasings(
    seen=(
        "Tell me a story about {a_hero}.",
        "Tell me a story about {a_hero}.",
        "Tell a story about {a_hero}.",
        "Write a story about {a_hero}.",
        "Write a short story about {a_hero}.",
        "Write me a story about {a_hero}.",
        "Can you tell me a story about {a_hero}?",
        "Could you write a story about {a_hero}?",
        "Please tell me a story about {a_hero}.",
        "I want a story about {a_hero}.",
        "A story about {a_hero}, please.",
        "Story about {a_hero}",
        "Make up a story about {a_hero}.",
        "Do you know a story about {a_hero}?",
    ),
    unseen=(
        "Let me hear a story about {a_hero}.",
        "I would like to read a story about {a_hero}.",
        "Invent a story about {a_hero}.",
        "Write a tale about {a_hero}.",
    ),
)
STORY_OF_TWO = Phrasings(
    seen=(
        "Tell me a story about {a_hero} and {a_helper}.",
        "Write a story about {a_hero} and {a_helper}.",
        "A story about {a_hero} and {a_helper}, please.",
        "Make up a story about {a_hero} and {a_helper}.",
    ),
    unseen=("Let me hear a story about {a_hero} and {a_helper}.",),
)
NAMED_STORY = Phrasings(
    seen=(
        "Tell me a story about {a_hero} called {name}.",
        "Write a story about {a_hero} named {name}.",
        "A story about {a_hero} called {name}, please.",
    ),
    unseen=("Let me hear a story about {a_hero} called {name}.",),
)
PLACED_STORY = Phrasings(
    seen=(
        "Tell me a story about {a_hero} who lives {place}.",
        "Write a story about {a_hero} {place}.",
        "Tell me a story about {a_hero} {place}.",
    ),
    unseen=("Let me hear a story about {a_hero} {place}.",),
)
POEM = Phrasings(
    seen=(
        "Write a poem about {about}.",
        "Write a poem about {about}.",
        "Write a short poem about {about}.",
        "Write me a poem about {about}.",
        "Can you write a poem about {about}?",
        "A poem about {about}, please.",
        "Poem about {about}",
        "Tell me a poem about {about}.",
        "Make a poem about {about}.",
        "Please write four lines about {about}.",
        "I need a poem about {about}.",
    ),
    unseen=("Let me hear a poem about {about}.", "Compose a poem about {about}.", "Could I have a poem about {about}?"),
)
ANY_POEM = Phrasings(
    seen=("Write a poem.", "Write me a poem.", "A poem, please.", "Tell me a poem.", "Can you write a poem?"),
    unseen=("Let me hear a poem.", "I would love to read a poem."),
)
SHORTER = Phrasings(
    seen=(
        "Make it shorter.",
        "Make it shorter, please.",
        "Shorter, please.",
        "Can you make it shorter?",
        "Tell it in two sentences.",
        "Sum it up.",
        "That was too long.",
    ),
    unseen=("Could you shorten it?", "Say it in fewer words."),
)
ANOTHER = Phrasings(
    seen=("Another one, please.", "Another one.", "One more.", "Another story, please.", "Tell me another.", "Again!"),
    unseen=("Let me hear another story.",),
)
ANOTHER_POEM = Phrasings(
    seen=("Another one, please.", "Another one.", "One more.", "Another poem, please.", "Write another."),
    unseen=("Let me hear another poem.",),
)
WHO = Phrasings(
    seen=(
        "Who is the hero?",
        "Who is the story about?",
        "Who was the hero of the story?",
        "What is the hero called?",
        "What was the name of the {hero}?",
        "Who is the main person?",
        "Tell me who the hero is.",
        "What is the {hero} called?",
        "What is the name of the hero?",
    ),
    unseen=("Who is the main character?", "Tell me the name of the {hero}."),
)
WISH = Phrasings(
    seen=(
        "What did {name} want?",
        "What was the wish?",
        "What did the {hero} want?",
        "What was the wish of {name}?",
        "What did {name} hope for?",
        "What was it that {name} wanted?",
    ),
    unseen=("What did {name} wish for?",),
)
HELPER = Phrasings(
    seen=(
        "Who helped {name}?",
        "Who helped?",
        "Who helped the {hero}?",
        "Who was the helper?",
        "Who came along to help?",
        "Who gave {name} help?",
        "Tell me who helped {name}.",
    ),
    unseen=("Who came to help {name}?",),
)
NEXT = Phrasings(
    seen=(
        "What happened next?",
        "And then?",
        "What happened then?",
        "Go on.",
        "Continue the story.",
        "And after that?",
    ),
    unseen=("How does it go on?",),
)
