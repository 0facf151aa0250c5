//! Six patterns of a guest's memory that is in the balloon, as bitmaps of its pages of 4 KiB.

use virtio_balloon::WIRE_PAGE;

/// Pages of the guest: 8 GiB.
pub(crate) const GUEST: u64 = (8 << 30) / WIRE_PAGE;

/// A bitmap of so many pages.
fn bitmap(pages: u64, mut taken: impl FnMut(u64) -> bool) -> Vec<u64> {
    let mut words = vec![0u64; pages.div_ceil(64) as usize];
    for page in 0..pages {
        words[(page / 64) as usize] |= u64::from(taken(page)) << (page % 64);
    }
    words
}

/// Numbers that are the same in every run (xorshift64).
pub(crate) fn random() -> impl FnMut() -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// The six patterns of this guest's pages.
pub(crate) fn patterns(guest: u64) -> [(&'static str, Vec<u64>); 6] {
    let mut half = random();
    let mut seven = random();
    let mut two = random();
    let begin = guest / 16 + 3;
    [
        (
            "one run of 7 GiB, ends not aligned",
            bitmap(guest, |page| (begin..begin + guest / 8 * 7).contains(&page)),
        ),
        (
            "7 of 8 blocks of 2 MiB whole, the eighth half full",
            bitmap(guest, |page| page / 512 % 8 != 7 || half() % 2 == 0),
        ),
        ("random 7 of 8", bitmap(guest, |_| seven() % 8 != 0)),
        ("random half", bitmap(guest, |_| two() % 2 == 0)),
        ("every second page", bitmap(guest, |page| page % 2 == 0)),
        (
            "every second 16 pages",
            bitmap(guest, |page| page / 16 % 2 == 0),
        ),
    ]
}
