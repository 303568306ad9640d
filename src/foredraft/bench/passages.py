"""Passages for the built-in suite: to be summarised, repeated or quoted from. Written for this project."""

from __future__ import annotations

TO_SUMMARISE = (
    "The town of Hallen had two bakeries on the same street for sixty years. Both made the same rye bread, and both "
    "families said that the recipe was theirs. When the older baker retired without children, everybody expected his "
    "shop to close. Instead his rival bought it, tore down the wall between the two ovens, and put both names above "
    "the door. Customers still argue about which half of the counter sells the better loaf, although every loaf now "
    "comes from one oven.",
    "Salt marshes grow where rivers meet the sea and the water is calm. Twice a day the tide covers them and leaves "
    "a thin layer of mud. Grasses hold the mud in place, so the marsh rises slowly and can keep up with a rising sea. "
    "A wide marsh also takes the strength out of storm waves before they reach the dike behind it. For a long time "
    "marshes were drained for farming. Some coasts now open the old dikes again, because a marsh is cheaper to keep "
    "than a higher wall.",
    "The school's first computer arrived in a van on a Tuesday. It filled a table in the library and could store "
    "fewer words than the smallest book on the shelves. For the first month only the mathematics teacher was allowed "
    "to touch it. Then a group of pupils wrote a program that printed the lunch menu, and after that nobody asked for "
    "permission any more. The machine was replaced ten years later, but the menu program ran until the printer broke.",
    "Night trains were given up in many countries when cheap flights appeared. They were slow, the carriages were "
    "old, and cleaning beds every morning cost money. In recent years they have returned on some routes. Travellers "
    "like that they save a night in a hotel and arrive in the middle of a city. The companies find it hard to buy new "
    "sleeping cars, because few factories still build them, so most of the new lines run with repaired old ones.",
    "A beekeeper in the hills noticed that her hives near the road made less honey than those in the orchard. She "
    "first blamed the noise of the cars. Then she weighed every hive each evening for a month and wrote down the "
    "weather. The hives near the road were lighter only in dry weeks, when the flowers along the road had no water. "
    "She moved a rain barrel to the roadside and let it drip, and in the next summer the difference was gone.",
    "The museum's largest clock has not shown the right time since 1931. It was built for a railway station and "
    "needs a person to climb a ladder once a week and wind it. When the station closed, the clock was given to the "
    "museum, but the ladder was not. The museum decided to leave the hands where they had stopped, at ten past four, "
    "and to explain on a sign why. Visitors photograph the sign more often than the clock.",
)

TO_REPEAT = (
    "The ferry leaves the north pier at seven in the morning and returns at nine in the evening. On the way it stops "
    "at three small islands. The first island has a lighthouse, the second has a farm, and the third has nothing but "
    "grass and birds. Passengers who leave the ferry on the third island must wave a red flag when they want to be "
    "taken back.",
    "Item 104: oak table, 4 legs, 120 by 80 cm, price 240 euros\n"
    "Item 105: oak chair, 4 legs, 45 by 45 cm, price 80 euros\n"
    "Item 106: pine shelf, 5 boards, 90 by 180 cm, price 130 euros\n"
    "Item 107: pine desk, 2 drawers, 140 by 70 cm, price 210 euros\n"
    "Item 108: birch stool, 3 legs, 35 by 35 cm, price 45 euros\n"
    "Item 109: birch bed, 6 slats, 200 by 90 cm, price 320 euros",
    "To clean the coffee machine, first switch it off and wait until it is cold. Remove the water tank and empty it. "
    "Mix one spoon of cleaning powder with one litre of warm water, fill the tank with it, and put the tank back. "
    "Switch the machine on and let all of the water run through. Then fill the tank with fresh water twice and let it "
    "run through again. Do not drink the water that comes out.",
)

# Documents, and what is asked about them.
TO_QUOTE = (
    (
        "[1] The Alder bridge was opened in 1907. It is 212 metres long and was built by the engineer Ruth Kessel.\n"
        "[2] The Birch bridge was opened in 1934. It is 148 metres long and carries only trains.\n"
        "[3] The Cedar bridge was opened in 1968. It is 305 metres long and replaced a ferry.",
        "Which bridge replaced a ferry? Copy the whole document that says so, then name the bridge.",
    ),
    (
        "[1] Members may borrow up to six books for four weeks. A book may be renewed twice unless somebody waits for "
        "it.\n"
        "[2] Films and records may be borrowed for one week and cannot be renewed.\n"
        "[3] A book that is lost must be replaced by the same edition, or paid for at the price of a new one.",
        "What happens when a member loses a book? Quote the rule word for word, then explain it in one sentence.",
    ),
    (
        "[1] The blue trail starts at the car park, is 4 km long, and passes the waterfall.\n"
        "[2] The red trail starts at the chapel, is 9 km long, and climbs to the ridge.\n"
        "[3] The green trail starts at the lake, is 6 km long, and is open only in summer.",
        "List the three trails again, each with its start and its length, and say which one passes the waterfall.",
    ),
)
