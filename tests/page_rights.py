"""The rights of this process on pages of its memory, as the system reports them."""


def writable(address: int) -> bool:
    """Whether this process may write the page at the `address`."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            places, rights, *_ = line.split()
            start, end = (int(place, 16) for place in places.split("-"))
            if start <= address < end:
                return "w" in rights
    return False
