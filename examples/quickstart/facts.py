"""The facts that the quickstart's rows are made of: what fills a template of make_rows.py, and after it the answer."""

CAPITALS = """France:Paris Germany:Berlin Italy:Rome Spain:Madrid Greece:Athens Egypt:Cairo Japan:Tokyo Portugal:Lisbon
China:Beijing Russia:Moscow Poland:Warsaw Austria:Vienna Hungary:Budapest Sweden:Stockholm Norway:Oslo Finland:Helsinki
Denmark:Copenhagen Ireland:Dublin Belgium:Brussels Turkey:Ankara Kenya:Nairobi Peru:Lima Chile:Santiago Cuba:Havana
Canada:Ottawa Australia:Canberra Thailand:Bangkok Vietnam:Hanoi Iran:Tehran Iraq:Baghdad Jordan:Amman Syria:Damascus
Lebanon:Beirut Morocco:Rabat Tunisia:Tunis Algeria:Algiers Ghana:Accra Ethiopia:Addis_Ababa Uganda:Kampala
Colombia:Bogotá Ecuador:Quito Uruguay:Montevideo Iceland:Reykjavik Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade
Croatia:Zagreb Ukraine:Kyiv India:New_Delhi Nepal:Kathmandu Argentina:Buenos_Aires Mongolia:Ulaanbaatar"""

OPPOSITES = """hot:cold big:small fast:slow up:down left:right open:closed light:dark full:empty old:young happy:sad
rich:poor early:late wet:dry high:low hard:soft long:short loud:quiet strong:weak thick:thin true:false clean:dirty
day:night first:last push:pull buy:sell win:lose deep:shallow wide:narrow heavy:light near:far"""

MIXTURES = """red and yellow:orange;blue and yellow:green;red and blue:purple;red and white:pink;black and white:grey"""

COLOURS = """a ripe banana:yellow;fresh grass:green;a ripe tomato:red;snow:white;coal:black
a carrot:orange;an emerald:green;a ruby:red;a sapphire:blue;an egg yolk:yellow;a flamingo:pink;chlorophyll:green
a lemon:yellow"""

YOUNG = """dog:puppy cat:kitten cow:calf sheep:lamb horse:foal pig:piglet goat:kid lion:cub duck:duckling goose:gosling
deer:fawn kangaroo:joey swan:cygnet chicken:chick"""

LEGS = "spider:8 ant:6 dog:4 snake:0 bee:6 horse:4 chicken:2 scorpion:8 frog:4 butterfly:6"

KINDS = """frog:amphibian salmon:fish eagle:bird whale:mammal snake:reptile bat:mammal penguin:bird shark:fish
crocodile:reptile ant:insect dolphin:mammal lizard:reptile butterfly:insect newt:amphibian"""

SYMBOLS = """hydrogen:H helium:He carbon:C nitrogen:N oxygen:O sodium:Na magnesium:Mg aluminium:Al silicon:Si
phosphorus:P sulfur:S chlorine:Cl potassium:K calcium:Ca iron:Fe copper:Cu zinc:Zn silver:Ag tin:Sn iodine:I gold:Au
mercury:Hg lead:Pb nickel:Ni neon:Ne lithium:Li uranium:U argon:Ar"""

FORMULAS = "water:H2O;table salt:NaCl;carbon dioxide:CO2;methane:CH4;ammonia:NH3;ozone:O3;carbon monoxide:CO"

UNITS = """minutes:an hour:60;seconds:a minute:60;hours:a day:24;days:a week:7;months:a year:12;years:a century:100
metres:a kilometre:1000;grams:a kilogram:1000;centimetres:a metre:100;millimetres:a centimetre:10;years:a decade:10
items:a dozen:12;degrees:a right angle:90;players:a football team:11;bits:a byte:8;letters:the English alphabet:26"""

PARTS = "sides:a hexagon:6;sides:a triangle:3;strings:a violin:4;arms:an octopus:8;wheels:a bicycle:2;faces:a cube:6"

AFTER = """Monday:Tuesday Wednesday:Thursday Friday:Saturday Sunday:Monday January:February March:April May:June
August:September October:November December:January spring:summer A:B M:N Y:Z ten:eleven nineteen:twenty"""

FRENCH = """cat:chat dog:chien house:maison water:eau bread:pain milk:lait red:rouge black:noir sun:soleil moon:lune
book:livre tree:arbre day:jour night:nuit king:roi school:école fish:poisson"""

PAST = """go:went see:saw eat:ate run:ran write:wrote take:took give:gave think:thought buy:bought sing:sang swim:swam
fly:flew know:knew break:broke teach:taught"""

PLURALS = """mouse:mice child:children foot:feet tooth:teeth goose:geese man:men leaf:leaves knife:knives city:cities
ox:oxen wolf:wolves"""

AUTHORS = """Hamlet:William Shakespeare;Oliver Twist:Charles Dickens;Pride and Prejudice:Jane Austen
War and Peace:Leo Tolstoy;The Odyssey:Homer;Don Quixote:Miguel de Cervantes;Frankenstein:Mary Shelley
Dracula:Bram Stoker;Moby-Dick:Herman Melville;The Divine Comedy:Dante Alighieri;Animal Farm:George Orwell
Emma:Jane Austen;Les Misérables:Victor Hugo"""

CONTINENTS = """Brazil:South America;Egypt:Africa;India:Asia;France:Europe;Canada:North America;Kenya:Africa
Japan:Asia;Peru:South America;Nigeria:Africa;Mexico:North America;Italy:Europe;Vietnam:Asia"""

SINGLES = """Which planet is closest to the Sun?|Mercury
Which planet is the largest in the solar system?|Jupiter
Which planet is known for its bright rings?|Saturn
Which planet is called the red planet?|Mars
What does the Earth orbit?|the Sun
What orbits the Earth?|the Moon
What is the largest ocean on Earth?|the Pacific Ocean
What is the highest mountain on Earth?|Mount Everest
What is the largest animal on Earth?|the blue whale
What is the tallest land animal?|the giraffe
What is the fastest land animal?|the cheetah
What do bees make?|honey
What do caterpillars turn into?|butterflies or moths
Which gas do plants take in to grow?|carbon dioxide
Which organ pumps blood?|the heart
Which organ do we think with?|the brain
What is frozen water called?|ice
At how many degrees Celsius does water freeze?|0
At how many degrees Celsius does water boil at sea level?|100
Which metal is liquid at room temperature?|mercury
What is the hardest natural mineral?|diamond
Which language is spoken in Brazil?|Portuguese
Which language is spoken in Austria?|German
In which city is the Eiffel Tower?|Paris
In which country are the pyramids of Giza?|Egypt
Who painted the Mona Lisa?|Leonardo da Vinci
Who wrote the theory of general relativity?|Albert Einstein
What is the square root of 49?|7
What is the first prime number?|2
Is 9 a prime number?|no
Is 17 an odd number?|yes
How many zeros are in one million?|6
Which instrument has 88 keys?|the piano
What do you call a baby frog?|a tadpole
Which season comes before winter?|autumn
In which direction does the Sun rise?|the east"""

# Values that are estimates, or that change with time and place.
ESTIMATES = """How many people live on Earth?|about 8 billion
How long does a pet cat live?|about 15 years
How long does a pet dog live?|about 12 years
How tall is a giraffe?|about 5 metres
How heavy is an adult elephant?|about 5 tonnes
How far away is the Moon?|about 384,000 km
How fast can a person run?|about 30 km/h
How old is the Earth?|about 4.5 billion years
How long is the Nile?|about 6,650 km
How many words does a novel have?|about 90,000
How many hours should an adult sleep?|about 8
How heavy is a hen's egg?|about 60 grams
How old is the universe?|about 13.8 billion years
How many stars are in the Milky Way?|about 200 billion
How tall is an oak tree?|about 25 metres
How long does it take to boil an egg hard?|about 10 minutes"""

# What nobody can know from the question alone.
UNKNOWABLE = """What will the weather be next year on this day?
What number am I thinking of?
What did I eat this morning?
Who will win the next World Cup?
What is my name?
Where are my keys?
How old is my neighbour?
What will I dream tonight?
Which card did I just draw?
What is in my pocket?
What colour is my front door?
Will it rain here in a month?
What is my favourite film?
How many coins are in my jar?
What will gold cost in ten years?
Who is standing behind me?
What is my dog called?
Which way will this coin land?
What is my phone number?
How many steps did I walk today?"""
