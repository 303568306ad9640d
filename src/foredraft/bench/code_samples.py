"""Code for the built-in suite: each sample is to be printed again with one small change. Written for this project."""

from __future__ import annotations

SHELF = '''\
class Shelf:
    """Books in the order in which they were put on it."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.books = []

    def put(self, book):
        if len(self.books) >= self.capacity:
            raise ValueError("The shelf is full.")
        self.books.append(book)

    def take(self, title):
        for place, book in enumerate(self.books):
            if book.title == title:
                return self.books.pop(place)
        raise KeyError(title)

    def titles(self):
        return [book.title for book in self.books]

    def __len__(self):
        return len(self.books)
'''

THERMOMETER = """\
function readThermometer(samples) {
  let sum = 0;
  let count = 0;
  let highest = -Infinity;
  let lowest = Infinity;
  for (const sample of samples) {
    if (sample.value === null) {
      continue;
    }
    sum += sample.value;
    count += 1;
    if (sample.value > highest) {
      highest = sample.value;
    }
    if (sample.value < lowest) {
      lowest = sample.value;
    }
  }
  if (count === 0) {
    return { mean: null, highest: null, lowest: null };
  }
  return { mean: sum / count, highest: highest, lowest: lowest };
}
"""

ORDERS = """\
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL,
    placed_on DATE NOT NULL,
    status TEXT NOT NULL DEFAULT 'open',
    total_cents INTEGER NOT NULL
);

CREATE INDEX orders_by_customer ON orders (customer_id);

CREATE VIEW open_orders AS
SELECT id, customer_id, placed_on, total_cents
FROM orders
WHERE status = 'open';

CREATE VIEW customer_totals AS
SELECT customer_id, COUNT(*) AS order_count, SUM(total_cents) AS total_cents
FROM orders
GROUP BY customer_id;

CREATE VIEW late_orders AS
SELECT id, customer_id, placed_on
FROM orders
WHERE status = 'open' AND placed_on < DATE('now', '-14 days');
"""

FERRY = """\
def parse_line(line):
    name, minutes, fare = line.split(",")
    return name.strip(), int(minutes), float(fare)


def load_routes(path):
    routes = []
    with open(path) as file:
        for line in file:
            if line.startswith("#"):
                continue
            routes.append(parse_line(line))
    return routes


def cheapest(routes):
    return min(routes, key=lambda route: route[2])


def fastest(routes):
    return min(routes, key=lambda route: route[1])


def show(routes):
    for name, minutes, fare in routes:
        print(f"{name:20} {minutes:4} min {fare:7.2f}")
"""

GARDEN = """\
garden:
  name: North plot
  owner: Mira
  beds:
    - id: 1
      plant: carrots
      rows: 6
      water_every_days: 3
    - id: 2
      plant: beans
      rows: 4
      water_every_days: 2
    - id: 3
      plant: onions
      rows: 8
      water_every_days: 4
    - id: 4
      plant: lettuce
      rows: 5
      water_every_days: 1
  tools:
    - spade
    - rake
    - watering can
"""

QUEUE = """\
#include <stdlib.h>

struct queue {
    int *items;
    int head;
    int size;
    int capacity;
};

int queue_init(struct queue *q, int capacity) {
    q->items = malloc(capacity * sizeof(int));
    q->head = 0;
    q->size = 0;
    q->capacity = capacity;
    return q->items != NULL;
}

int queue_push(struct queue *q, int item) {
    if (q->size == q->capacity) {
        return 0;
    }
    q->items[(q->head + q->size) % q->capacity] = item;
    q->size += 1;
    return 1;
}

int queue_pop(struct queue *q, int *item) {
    if (q->size == 0) {
        return 0;
    }
    *item = q->items[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->size -= 1;
    return 1;
}
"""

# What to change, and the code.
EDITS = (
    ("Rename the class Shelf to Bookcase.", "python", SHELF),
    ("Rename the function readThermometer to summariseSamples.", "javascript", THERMOMETER),
    ("Rename the table orders to purchases everywhere. Keep the names of the views.", "sql", ORDERS),
    ("Rename the function cheapest to lowest_fare.", "python", FERRY),
    ("Change the owner from Mira to Jonas.", "yaml", GARDEN),
    ("Rename the struct queue to struct ring. Keep the names of the functions.", "c", QUEUE),
)
