//! Memory of drivers of the crate `virtio-drivers`: what a device reaches of it, and what becomes of it.

#![allow(unsafe_code, reason = "the functions of `Hal` are unsafe")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use hostmem::{Backing, Mapping};
use ioas::{
    Area, Cause, DmaPages, DriverMemory, DriverMemoryError, HalMemory, HostPages, Ioas, Ledger,
    Listener, MapError, PageSource, UNREACHABLE, UnmapError, VirtioHal,
};
use iommu::FlushError;
use iopt::Prot;
use runs::{Iova, Span};
use virtio_drivers::BufferDirection::{self, Both, DeviceToDriver, DriverToDevice};
use virtio_drivers::Hal;

use super::{MIB, alone, space};

const PAGE: u64 = 4096;
const WINDOW: u64 = 2 * PAGE;

/// A driver's memory for each test, as its `Hal` finds it.
struct Case {
    space: Arc<Ioas>,
    ledger: Arc<Ledger>,
    mapping: Arc<Mapping>,
}

impl Case {
    fn new(memory: &'static OnceLock<DriverMemory>, limit: u64) -> Self {
        let (space, _) = space();
        let case = Self {
            space: Arc::new(space),
            ledger: Ledger::new("a driver's memory", Some(limit), 0),
            mapping: Arc::new(Mapping::new(Backing::Anon4K, MIB, None).unwrap()),
        };
        let pages = HostPages::new(case.mapping.clone(), &case.ledger);
        let made = DriverMemory::new(case.space.clone(), pages, WINDOW as usize).unwrap();
        assert!(memory.set(made).is_ok());
        case
    }

    /// Place of `paddr` for a device: the area, and the offset in the mapping.
    fn place(&self, paddr: u64) -> Option<(Area, u64)> {
        let area = self.space.area_at(paddr)?;
        let offset = area.part().start + (paddr - area.range().start);
        Some((area, offset))
    }

    /// A device's access of one word.
    fn word(&self, paddr: u64) -> &std::sync::atomic::AtomicU64 {
        let (_, offset) = self.place(paddr).unwrap();
        &self.mapping.cells()[offset as usize / 8]
    }
}

macro_rules! hal {
    ($memory:ident, $hal:ident) => {
        static $memory: OnceLock<DriverMemory> = OnceLock::new();
        struct Here;
        impl HalMemory for Here {
            fn memory() -> Option<&'static DriverMemory> {
                $memory.get()
            }
        }
        type $hal = VirtioHal<Here>;
    };
}

/// The calls of `Hal`, as the crate makes them.
fn dealloc<H: Hal>((paddr, at): (u64, NonNull<u8>), pages: usize) {
    // SAFETY: as it was allocated.
    assert_eq!(unsafe { H::dma_dealloc(paddr, at, pages) }, 0);
}

fn share<H: Hal>(buffer: &mut [u8]) -> u64 {
    // SAFETY: the buffer is this thread's.
    unsafe { H::share(NonNull::from(buffer), Both) }
}

fn unshare<H: Hal>(paddr: u64, buffer: &mut [u8], direction: BufferDirection) {
    // SAFETY: the buffer that was shared.
    unsafe { H::unshare(paddr, NonNull::from(buffer), direction) }
}

#[test]
fn rings_are_zeroed_and_mapped_with_what_the_device_may_do_and_no_longer_than_allocated() {
    let _alone = alone();
    hal!(MEMORY, H);
    assert_eq!(H::dma_alloc(1, Both).0, 0, "no memory yet");
    let case = Case::new(&MEMORY, MIB);
    for (direction, prot) in [
        (DriverToDevice, Prot::READ),
        (DeviceToDriver, Prot::RW),
        (Both, Prot::RW),
    ] {
        let rings = H::dma_alloc(3, direction);
        let (area, offset) = case.place(rings.0).unwrap();
        assert_eq!((area.prot(), area.range().len), (prot, 3 * PAGE));
        assert_eq!(rings.1.as_ptr() as u64, case.mapping.address() + offset);
        assert_eq!(case.ledger.in_use(), WINDOW + 3 * PAGE);
        for at in (0..3 * PAGE).step_by(8) {
            let word = case.word(rings.0 + at);
            assert_eq!(word.swap(!at, Ordering::Relaxed), 0);
        }
        dealloc::<H>(rings, 3);
        assert!(case.place(rings.0).is_none());
        assert_eq!(case.ledger.in_use(), WINDOW);
    }
    assert_eq!(MEMORY.get().unwrap().failure().0, 0);
}

#[test]
fn a_device_reaches_copies_of_buffers_and_nothing_beside_them() {
    let _alone = alone();
    hal!(MEMORY, H);
    let case = Case::new(&MEMORY, MIB);
    // Odd bytes at odd places, and one that is larger than the window.
    for len in [1, 7, 8, 9, 64, 4095, 3 * PAGE as usize + 5] {
        let mut heap = vec![0x5a; len + 3];
        let buffer = &mut heap[3..];
        let paddr = share::<H>(buffer);
        let (area, _) = case.place(paddr).unwrap();
        let (first, last) = (paddr, paddr + len as u64 - 1);
        assert!(Span::<Iova>::new(area.range().start, area.range().len).contains(last));
        assert_ne!(
            area.memory().object().in_process().map(|at| at.address()),
            Some(buffer.as_ptr() as u64)
        );
        assert_eq!(case.word(first).load(Ordering::Relaxed) & 0xff, 0x5a);
        // The device writes the first word, and the driver asks for none, then for what it wrote.
        case.word(first)
            .store(u64::from_le_bytes([0xa5; 8]), Ordering::Relaxed);
        unshare::<H>(paddr, buffer, DriverToDevice);
        assert!(buffer.iter().all(|byte| *byte == 0x5a));
        let paddr = share::<H>(buffer);
        case.word(paddr)
            .store(u64::from_le_bytes([0xa5; 8]), Ordering::Relaxed);
        unshare::<H>(paddr, buffer, DeviceToDriver);
        let written = len.min(8);
        assert!(buffer[..written].iter().all(|byte| *byte == 0xa5));
        assert!(buffer[written..].iter().all(|byte| *byte == 0x5a));
        assert_eq!(heap[..3], [0x5a; 3]);
    }
    assert_eq!(case.ledger.in_use(), WINDOW);
    assert_eq!(MEMORY.get().unwrap().failure().0, 0);
}

#[test]
fn beyond_the_limit_the_driver_has_an_error_and_the_device_a_fault() {
    let _alone = alone();
    hal!(MEMORY, H);
    let case = Case::new(&MEMORY, WINDOW + 4 * PAGE);
    let rings = H::dma_alloc(4, Both);
    assert_ne!(rings.0, 0);
    assert_eq!(H::dma_alloc(1, Both).0, 0);
    let (count, failure) = MEMORY.get().unwrap().failure();
    let Some(DriverMemoryError::Map(MapError::OverLimit(over))) = failure else {
        panic!("{failure:?}");
    };
    assert_eq!(
        (count, over.needed, over.in_use),
        (1, PAGE, WINDOW + 4 * PAGE)
    );
    // The window is full, and no pages are left.
    let mut full = vec![1; WINDOW as usize];
    let in_window = share::<H>(&mut full);
    let mut more = [2; 64];
    let paddr = share::<H>(&mut more);
    assert_eq!(paddr, UNREACHABLE);
    assert!(case.place(paddr).is_none());
    unshare::<H>(paddr, &mut more, Both);
    assert_eq!(more, [2; 64]);
    unshare::<H>(in_window, &mut full, Both);
    assert_ne!(share::<H>(&mut more), UNREACHABLE);
    dealloc::<H>(rings, 4);
    // None, more than there is, and more than can be counted.
    for pages in [0, 1 << 20, usize::MAX] {
        assert_eq!(H::dma_alloc(pages, Both).0, 0);
        let failure = MEMORY.get().unwrap().failure().1.unwrap();
        let named = match failure {
            DriverMemoryError::Length { pages: asked } => asked == pages,
            DriverMemoryError::Pages { bytes, ref cause } => {
                bytes == 4 << 30 && cause.to_string().contains("0x100000 are free")
            }
            _ => false,
        };
        assert!(named, "{failure}");
    }
    // Memory that was not allocated is not freed, and is reported.
    dealloc::<H>((0x1000, NonNull::dangling()), 1);
    let failure = MEMORY.get().unwrap().failure().1;
    assert!(matches!(
        failure,
        Some(DriverMemoryError::Unknown { paddr: 0x1000 })
    ));
}

/// It has a translation that it does not give up.
#[derive(Default)]
struct Stuck(AtomicBool);

impl Listener for Stuck {
    fn mapped(&self, _: &Area) {}

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        let waited = std::time::Duration::ZERO;
        match self.0.load(Ordering::Relaxed) {
            true => Err(FlushError::Held { range, waited }),
            false => Ok(()),
        }
    }
}

#[test]
fn memory_that_a_device_may_still_reach_is_not_used_again() {
    let _alone = alone();
    hal!(MEMORY, H);
    let case = Case::new(&MEMORY, MIB);
    let stuck = Arc::new(Stuck::default());
    case.space.add_listener(stuck.clone());
    let lost = H::dma_alloc(1, Both);
    stuck.0.store(true, Ordering::Relaxed);
    dealloc::<H>(lost, 1);
    let failure = MEMORY.get().unwrap().failure().1;
    let flush = matches!(
        failure,
        Some(DriverMemoryError::Unmap(UnmapError::Flush(_)))
    );
    assert!(flush, "{failure:?}");
    stuck.0.store(false, Ordering::Relaxed);
    let all: Vec<_> = (0..64).map(|_| H::dma_alloc(1, Both)).collect();
    assert!(all.iter().all(|(_, at)| *at != lost.1));
}

/// Pages of which there are none.
struct Rare(HostPages, bool);

// SAFETY: as for the source behind it.
unsafe impl PageSource for Rare {
    fn allocate(&self, bytes: u64) -> Result<DmaPages, Cause> {
        match self.1 {
            true => self.0.allocate(bytes),
            false => Err("none".into()),
        }
    }

    fn free(&self, pages: DmaPages) {
        self.0.free(pages);
    }
}

#[test]
fn what_threads_allocate_and_share_is_theirs_and_all_of_it_comes_back() {
    let _alone = alone();
    hal!(MEMORY, H);
    let case = Case::new(&MEMORY, MIB);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut rings = Vec::new();
                let mut buffers: Vec<(u64, Vec<u8>, u8)> = Vec::new();
                for step in 0..2000_u64 {
                    let mark = random.u8(..);
                    match random.u8(0..6) {
                        0 => {
                            let pages = random.usize(1..5);
                            let (paddr, at) = H::dma_alloc(pages, Both);
                            if paddr != 0 {
                                // SAFETY: it is this thread's, and all 0.
                                let words =
                                    unsafe { at.cast::<u64>().as_ptr().replace(step << 8 | seed) };
                                assert_eq!(words, 0);
                                rings.push((paddr, at, pages, step << 8 | seed));
                            }
                        }
                        1 | 2 if !rings.is_empty() => {
                            let (paddr, at, pages, word) =
                                rings.swap_remove(random.usize(..rings.len()));
                            // SAFETY: it is this thread's.
                            assert_eq!(unsafe { at.cast::<u64>().read() }, word);
                            dealloc::<H>((paddr, at), pages);
                        }
                        3 | 4 if !buffers.is_empty() => {
                            let (paddr, mut buffer, mark) =
                                buffers.swap_remove(random.usize(..buffers.len()));
                            buffer.fill(!mark);
                            unshare::<H>(paddr, &mut buffer, Both);
                            let expected = if paddr == UNREACHABLE { !mark } else { mark };
                            assert!(buffer.iter().all(|byte| *byte == expected));
                        }
                        _ => {
                            let mut buffer = vec![mark; random.usize(1..3000)];
                            buffers.push((share::<H>(&mut buffer), buffer, mark));
                        }
                    }
                }
                rings
                    .into_iter()
                    .for_each(|(paddr, at, pages, _)| dealloc::<H>((paddr, at), pages));
                for (paddr, mut buffer, _) in buffers {
                    unshare::<H>(paddr, &mut buffer, Both);
                }
            });
        }
    });
    assert_eq!(case.ledger.in_use(), WINDOW);
    assert_eq!(case.space.len(), 1);
    let whole = share::<H>(&mut [0; WINDOW as usize]);
    assert_eq!(case.place(whole).unwrap().0.range().len, WINDOW);
}

#[test]
fn a_memory_that_is_dropped_leaves_no_area_and_no_charge() {
    let _alone = alone();
    let (space, _) = space();
    let space = Arc::new(space);
    let ledger = Ledger::new("a driver's memory", Some(MIB), 0);
    let made = |there| {
        let mapping = Arc::new(Mapping::new(Backing::Anon4K, MIB, None).unwrap());
        let source = Rare(HostPages::new(mapping, &ledger), there);
        DriverMemory::new(space.clone(), source, WINDOW as usize)
    };
    for there in [true, false, true] {
        match made(there) {
            Ok(memory) => {
                assert_eq!((there, ledger.in_use()), (true, WINDOW));
                drop(memory);
            }
            Err(DriverMemoryError::Pages { bytes: WINDOW, .. }) => assert!(!there),
            Err(error) => panic!("{error}"),
        }
        assert_eq!((ledger.in_use(), space.len()), (0, 0));
    }
}
