"""How numbers are asked for. Per operation: in sentences, tersely, and once more after an answer."""

from benchmarks.demo_model.corpus.base import Phrasings

ADD = (
    Phrasings(
        seen=(
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "What's {a} + {b}?",
            "What's {a} plus {b}?",
            "What is {a} and {b}?",
            "How much is {a} + {b}?",
            "How much is {a} plus {b}?",
            "How much is {a} and {b}?",
            "Calculate {a} + {b}.",
            "Compute {a} + {b}.",
            "Add {a} and {b}.",
            "Add {a} to {b}.",
            "Please add {a} and {b}.",
            "Can you add {a} and {b}?",
            "Could you work out {a} plus {b}?",
            "What is the sum of {a} and {b}?",
            "What do you get when you add {a} and {b}?",
            "Tell me what {a} plus {b} is.",
            "Do you know what {a} plus {b} is?",
            "{a} + {b} is how much?",
            "{a} plus {b} equals what?",
        ),
        unseen=(
            "What is the total of {a} and {b}?",
            "If I add {a} and {b}, what do I get?",
            "Find {a} + {b}.",
            "Give me the sum of {a} and {b}.",
        ),
    ),
    Phrasings(("{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=", "{a}+{b}?", "{a} + {b} = ?"), ("{a} + {b} equals",)),
    Phrasings(
        ("And {a} + {b}?", "And {a} plus {b}?", "What about {a} + {b}?", "Now {a} plus {b}."), ("Then {a} + {b}?",)
    ),
)
SUBTRACT = (
    Phrasings(
        seen=(
            "What is {a} - {b}?",
            "What is {a} minus {b}?",
            "What's {a} - {b}?",
            "What's {a} minus {b}?",
            "How much is {a} - {b}?",
            "How much is {a} minus {b}?",
            "Calculate {a} - {b}.",
            "Compute {a} - {b}.",
            "Subtract {b} from {a}.",
            "Please subtract {b} from {a}.",
            "Take {b} away from {a}.",
            "What is {a} take away {b}?",
            "Can you subtract {b} from {a}?",
            "What is left when you take {b} from {a}?",
            "Tell me what {a} minus {b} is.",
            "Do you know what {a} minus {b} is?",
            "{a} - {b} is how much?",
            "{a} minus {b} equals what?",
        ),
        unseen=(
            "If I take {b} from {a}, what is left?",
            "Could you work out {a} minus {b}?",
            "Find {a} - {b}.",
            "How much is {a} less {b}?",
        ),
    ),
    Phrasings(("{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a}-{b}=", "{a}-{b}?", "{a} - {b} = ?"), ("{a} - {b} equals",)),
    Phrasings(
        ("And {a} - {b}?", "And {a} minus {b}?", "What about {a} - {b}?", "Now {a} minus {b}."), ("Then {a} - {b}?",)
    ),
)
MULTIPLY = (
    Phrasings(
        seen=(
            "What is {a} x {b}?",
            "What is {a} times {b}?",
            "What's {a} times {b}?",
            "What is {a} * {b}?",
            "What is {a} multiplied by {b}?",
            "How much is {a} times {b}?",
            "How much is {a} x {b}?",
            "Calculate {a} x {b}.",
            "Calculate {a} * {b}.",
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}.",
            "Please multiply {a} by {b}.",
            "Can you multiply {a} by {b}?",
            "What is the product of {a} and {b}?",
            "Tell me what {a} times {b} is.",
            "Do you know what {a} times {b} is?",
            "{a} times {b} equals what?",
        ),
        unseen=(
            "If I multiply {a} by {b}, what do I get?",
            "Could you work out {a} times {b}?",
            "Find {a} x {b}.",
            "Give me the product of {a} and {b}.",
        ),
    ),
    Phrasings(("{a} x {b}", "{a}*{b}", "{a} * {b}", "{a} x {b} =", "{a}x{b}?", "{a} * {b} ="), ("{a} times {b} =",)),
    Phrasings(
        ("And {a} x {b}?", "And {a} times {b}?", "What about {a} x {b}?", "Now {a} times {b}."), ("Then {a} x {b}?",)
    ),
)
DIVIDE = (
    Phrasings(
        seen=(
            "What is {a} / {b}?",
            "What is {a} divided by {b}?",
            "What's {a} divided by {b}?",
            "How much is {a} divided by {b}?",
            "How much is {a} / {b}?",
            "Calculate {a} / {b}.",
            "Divide {a} by {b}.",
            "Please divide {a} by {b}.",
            "Can you divide {a} by {b}?",
            "How many times does {b} go into {a}?",
            "Tell me what {a} divided by {b} is.",
            "{a} divided by {b} equals what?",
        ),
        unseen=(
            "If I divide {a} by {b}, what do I get?",
            "Could you work out {a} divided by {b}?",
            "Find {a} / {b}.",
        ),
    ),
    Phrasings(("{a} / {b}", "{a}/{b}", "{a} / {b} =", "{a}/{b}=", "{a}/{b}?"), ("{a} / {b} equals",)),
    Phrasings(
        ("And {a} / {b}?", "And {a} divided by {b}?", "What about {a} / {b}?", "Now {a} divided by {b}."),
        ("Then {a} / {b}?",),
    ),
)
GETS = Phrasings(
    seen=(
        "{who} has {a} {things} and gets {b} more. How many {things} does {who} have?",
        "{who} has {a} {things} and buys {b} more. How many {things} does {who} have now?",
        "{who} had {a} {things} and found {b} more. How many {things} does {who} have now?",
        "{who} has {a} {things}. A friend gives {who} {b} more. How many are there now?",
        "{who} owns {a} {things} and gets {b} more. How many is that?",
        "{who} has {a} {things}, then buys {b} {things}. How many {things} are there?",
        "There are {a} {things} and {who} brings {b} more. How many {things} are there?",
        "If {who} has {a} {things} and gets {b} more, how many does {who} have?",
    ),
    unseen=("{who} owns {a} {things} and then gets {b} more {things}. How many is that?",),
)
GIVES = Phrasings(
    seen=(
        "{who} has {a} {things} and gives away {b}. How many {things} are left?",
        "{who} has {a} {things} and loses {b}. How many {things} does {who} have left?",
        "{who} had {a} {things} and sold {b}. How many {things} are left?",
        "{who} has {a} {things}. {who} gives {b} to a friend. How many are left?",
        "{who} owns {a} {things} and loses {b}. How many remain?",
        "{who} had {a} {things} and then gave {b} of them away. How many are left?",
        "If {who} has {a} {things} and eats {b}, how many are left?",
        "{who} has {a} {things} but sells {b} of them. How many does {who} still have?",
    ),
    unseen=("{who} owns {a} {things} and then gives {b} of them away. How many remain?",),
)
LARGER = Phrasings(
    seen=(
        "Which is larger, {a} or {b}?",
        "Which is bigger, {a} or {b}?",
        "Which is greater, {a} or {b}?",
        "Which is more, {a} or {b}?",
        "Which number is larger, {a} or {b}?",
        "What is larger: {a} or {b}?",
        "What is more, {a} or {b}?",
        "{a} or {b}: which is larger?",
        "{a} or {b}, which is bigger?",
        "Name the larger of {a} and {b}.",
        "Compare {a} and {b}.",
    ),
    unseen=("Which one is the bigger number, {a} or {b}?", "Of {a} and {b}, which is larger?"),
)
SMALLER = Phrasings(
    seen=(
        "Which is smaller, {a} or {b}?",
        "Which is less, {a} or {b}?",
        "Which number is smaller, {a} or {b}?",
        "What is smaller: {a} or {b}?",
        "{a} or {b}: which is smaller?",
        "Name the smaller of {a} and {b}.",
    ),
    unseen=("Which one is the smaller number, {a} or {b}?", "Of {a} and {b}, which is smaller?"),
)
IS_LARGER = Phrasings(
    seen=(
        "Is {a} larger than {b}?",
        "Is {a} bigger than {b}?",
        "Is {a} greater than {b}?",
        "Is {a} more than {b}?",
        "{a} is larger than {b}, right?",
        "True or false: {a} is larger than {b}.",
    ),
    unseen=("Would you say that {a} is larger than {b}?",),
)
SORT = Phrasings(
    seen=(
        "Sort {spoken}.",
        "Put {spoken} in order.",
        "Sort these numbers: {numbers}.",
        "Sort these numbers: {numbers}",
        "Put these numbers in order: {numbers}.",
        "Order {numbers} from small to large.",
        "Sort: {numbers}",
        "Sort {numbers} from smallest to largest.",
        "Can you sort {numbers}?",
        "Please sort these numbers: {spoken}.",
        "Put {numbers} in ascending order.",
        "Sort the list {numbers}.",
        "Arrange these numbers from small to large: {numbers}.",
        "Order these numbers: {spoken}",
        "Sort the following numbers: {numbers}.",
    ),
    unseen=("Arrange {spoken} from small to large.", "Bring {spoken} into order."),
)
SORT_DOWN = Phrasings(
    seen=(
        "Sort {numbers} from large to small.",
        "Put {spoken} in descending order.",
        "Sort these numbers, the largest first: {numbers}.",
        "Order {numbers} from largest to smallest.",
        "Sort {spoken} in descending order.",
        "Sort {numbers} backwards.",
    ),
    unseen=("Arrange {spoken} from large to small.",),
)
NEXT = Phrasings(
    seen=(
        "What comes after {n}?",
        "Which number comes after {n}?",
        "What number comes after {n}?",
        "What is the next number after {n}?",
        "What comes next after {n}?",
        "Which number follows {n}?",
    ),
    unseen=("Name the number after {n}.", "After {n} comes which number?"),
)
BEFORE = Phrasings(
    seen=(
        "What comes before {n}?",
        "Which number comes before {n}?",
        "What number comes before {n}?",
        "What number is just before {n}?",
        "Which number is right before {n}?",
    ),
    unseen=("Name the number before {n}.", "Before {n} comes which number?"),
)
TWICE = Phrasings(
    seen=(
        "What is twice {n}?",
        "What is double {n}?",
        "Double {n}.",
        "How much is twice {n}?",
        "What is the double of {n}?",
        "Can you double {n}?",
    ),
    unseen=("Please double {n}.", "How much is {n} doubled?"),
)
HALF = Phrasings(
    seen=("What is half of {n}?", "How much is half of {n}?", "Halve {n}.", "Half of {n}?", "What's half of {n}?"),
    unseen=("What is the half of {n}?", "Tell me half of {n}."),
)
SQUARE = Phrasings(
    seen=("What is {n} squared?", "What is the square of {n}?", "Square {n}.", "How much is {n} squared?"),
    unseen=("Tell me the square of {n}.",),
)
EVEN = Phrasings(
    seen=("Is {n} even or odd?", "Is {n} an even or an odd number?", "{n}: even or odd?", "Is {n} odd or even?"),
    unseen=("Even or odd: {n}?", "Would you call {n} even or odd?"),
)
COUNT = Phrasings(
    seen=(
        "Count from {first} to {last}.",
        "Please count from {first} to {last}.",
        "Can you count from {first} to {last}?",
        "Count up from {first} to {last}.",
        "List the numbers from {first} to {last}.",
        "Write the numbers from {first} to {last}.",
    ),
    unseen=("Say the numbers from {first} to {last}.", "Could you count from {first} up to {last}?"),
)
COUNT_MORE = (  # seen, with numbers in words as well
    "Count from {first} to {last} for me.",
    "Count from {first} up to {last}.",
    "Start at {first} and count to {last}.",
    "Counting from {first} to {last}, please.",
    "What are the numbers from {first} to {last}?",
)
COUNT_TO = Phrasings(
    seen=(
        "Count to {last}.",
        "Can you count to {last}?",
        "Please count to {last}.",
        "Count up to {last}.",
        "Count to {last} for me.",
        "Can you count up to {last}?",
        "Count to {last} please",
        "Count from one to {last}.",
        "Just count to {last}.",
        "I want you to count to {last}.",
        "Write the numbers up to {last}.",
        "Let us count to {last}.",
    ),
    unseen=("Could you count to {last}?", "Count for me to {last}."),
)
COUNT_DOWN = Phrasings(
    seen=(
        "Count down from {first} to {last}.",
        "Count backwards from {first} to {last}.",
        "Please count down from {first} to {last}.",
        "Can you count backwards from {first} to {last}?",
        "Count from {first} down to {last}.",
        "Count backward from {first} to {last}.",
    ),
    unseen=("Could you count down from {first} to {last}?",),
)
COUNT_DOWN_FROM = Phrasings(
    seen=(
        "Count down from {first}.",
        "Count backwards from {first}.",
        "Can you count backwards from {first}?",
        "Can you count down from {first}?",
        "Please count down from {first}.",
        "Count backward from {first}.",
        "Countdown from {first}.",
        "Do a countdown from {first}.",
        "Start at {first} and count down.",
        "Count backwards starting from {first}.",
    ),
    unseen=("Could you count backwards from {first}?", "Give me a countdown from {first}."),
)
TO_WORDS = Phrasings(
    seen=(
        "How do you write {n} in words?",
        "Write {n} in words.",
        "What is {n} in words?",
        "How do you spell {n}?",
        "Spell the number {n}.",
        "{n} in words?",
    ),
    unseen=("Please spell out {n}.", "Which words stand for {n}?"),
)
TO_DIGITS = Phrasings(
    seen=(
        "What is {words} in digits?",
        "Write {words} in digits.",
        "Write {words} as a number.",
        "Which number is {words}?",
        "{words} in digits?",
    ),
    unseen=("How do you write {words} with digits?",),
)
