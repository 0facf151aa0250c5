//! Stale translations: seen before the flush, gone after it, whatever happens at the same time.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Instant;

use runs::Pa;

use super::*;
use crate::target::BadTarget;

#[test]
fn a_stale_translation_is_seen_until_it_is_flushed() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    words.set(0x3008, (DATA + 0x1000) | RW);
    let mut port = unit.port(NIC);
    assert_eq!(read(&mut port, 0), Ok(DATA));
    assert_eq!(read(&mut port, 0x1000), Ok(DATA + 0x1000));
    words.set(0x3000, 0);
    words.set(0x3008, 0);
    assert_eq!(read(&mut port, 0), Ok(DATA));
    unit.invalidate_ranges(D1, &page(0), 1, false).unwrap();
    assert!(read(&mut port, 0).is_err());
    // Only what was named is gone.
    assert_eq!(read(&mut port, 0x1000), Ok(DATA + 0x1000));
    let counted = unit.flush_counters();
    assert_eq!((counted.flushes, counted.removed, counted.waits), (1, 1, 0));
}

#[test]
fn a_stale_large_leaf_goes_with_any_of_its_pages_if_its_level_is_named() {
    for (hints, levels, gone) in [
        (true, 0b10, true),
        (true, 0b01, false),
        (true, 0, true),
        (false, 0b01, true),
    ] {
        let (unit, words, _) = unit_with(SoftwareConfig {
            level_hints: hints,
            ..quick()
        });
        words.set(0x2008, DATA | 0x80 | RW);
        let mut port = unit.port(NIC);
        assert_eq!(read(&mut port, 0x21_0000), Ok(DATA + 0x1_0000));
        // The leaf becomes a table without entries.
        words.set(0x2008, 0x8000 | RW);
        unit.invalidate_ranges(D1, &page(0x3f_f000), levels, false)
            .unwrap();
        assert_eq!(
            read(&mut port, 0x21_0000).is_err(),
            gone,
            "{hints} {levels}"
        );
    }
}

#[test]
fn a_stale_table_is_used_until_tables_are_flushed() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    words.set(0x3008, (DATA + 0x1000) | RW);
    let mut port = unit.port(NIC);
    assert_eq!(read(&mut port, 0), Ok(DATA));
    // Another table takes the place of the one at 0x3000.
    words.set(0x8008, (DATA + 0x7000) | RW);
    words.set(0x2000, 0x8000 | RW);
    unit.invalidate_ranges(D1, &page(0x1000), 1, false).unwrap();
    assert_eq!(read(&mut port, 0x1000), Ok(DATA + 0x1000));
    unit.invalidate_ranges(D1, &page(0x1000), 1, true).unwrap();
    assert_eq!(read(&mut port, 0x1000), Ok(DATA + 0x7000));
}

#[test]
fn a_detached_device_reaches_nothing_and_its_domain_is_forgotten() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    let mut port = unit.port(NIC);
    assert_eq!(read(&mut port, 0), Ok(DATA));
    unit.detach(NIC).unwrap();
    assert_eq!(read(&mut port, 0), Err(FaultReason::NotAttached));
    assert_eq!(
        unit.detach(NIC),
        Err(UnitAttachError::NotAttached { device: NIC })
    );
    // The same domain again, over another table: nothing is left of the old one.
    words.set(0x4000, 0x5000 | RW);
    unit.attach(
        NIC,
        D1,
        Root {
            address: 0x4000,
            ..ROOT
        },
    )
    .unwrap();
    assert!(matches!(read(&mut port, 0), Err(FaultReason::Walk(_))));
}

#[test]
fn attach_refuses_what_the_unit_cannot_walk() {
    let mut capabilities = Unit_::full_capabilities();
    capabilities.output_bits = 40;
    capabilities.domain_bits = 8;
    capabilities.formats[0] = None;
    let (unit, ..) = unit_with(SoftwareConfig {
        capabilities,
        ..quick()
    });
    let text = |device, domain, root| unit.attach(device, domain, root).unwrap_err().to_string();
    let root = |address, levels| Root {
        format: FormatId::VtdSs,
        address,
        levels,
    };
    assert_eq!(
        text(NIC, D2, ROOT),
        "00:05.0 is attached to domain 1 already"
    );
    assert_eq!(
        text(DISK, D1, root(0x4000, 3)),
        "domain 1 has the root 0x1000 (vtd-ss, 3 levels) on this unit, not 0x4000 (vtd-ss, 3 levels)"
    );
    assert_eq!(
        text(DISK, D2, root(0x1000, 2)),
        "the unit walks no vtd-ss tables of 2 levels, only of 3/4/5"
    );
    assert_eq!(
        text(DISK, D2, root(0x1008, 3)),
        "the root 0x1008 is not a page's address of 40 bits"
    );
    assert!(unit.attach(DISK, D2, root(1 << 40, 3)).is_err());
    assert!(unit.attach(DISK, D2, root(0x1000, 255)).is_err());
    let amd = Root {
        format: FormatId::AmdV1,
        ..ROOT
    };
    assert_eq!(text(DISK, D2, amd), "the unit does not walk amdv1 tables");
    assert_eq!(
        text(DISK, DomainId(256), ROOT),
        "domain 256 does not fit in the unit's 8 bits"
    );
    // None of these left anything behind.
    unit.attach(DISK, D2, root(0x4000, 3)).unwrap();
}

/// Memory in which accesses can be held.
struct Gate {
    data: Data,
    held: mpsc::SyncSender<()>,
    closed: AtomicBool,
}

impl TargetMemory for Gate {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        if self.closed.load(Ordering::SeqCst) {
            self.held.send(()).unwrap();
            while self.closed.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        self.data.with_cells(span, visit)
    }
}

#[test]
fn a_flush_waits_for_an_access_under_way_and_the_wait_is_bounded() {
    let words = tables();
    words.set(0x3000, DATA | RW);
    let (held, waiting) = mpsc::sync_channel(1);
    let gate = Arc::new(Gate {
        data: data(4096),
        held,
        closed: AtomicBool::new(true),
    });
    let unit = SoftwareUnit::with_config(words.clone(), gate.clone(), quick());
    unit.attach(NIC, D1, ROOT).unwrap();
    unit.attach(
        DISK,
        D2,
        Root {
            address: 0x4000,
            ..ROOT
        },
    )
    .unwrap();
    thread::scope(|scope| {
        let mut port = unit.port(NIC);
        let access = scope.spawn(move || port.read(0, &mut [0]));
        let _open = Finally(&gate.closed, false);
        waiting.recv().unwrap();
        words.set(0x3000, 0);
        let before = Instant::now();
        let error = unit.invalidate_ranges(D1, &page(0), 1, false).unwrap_err();
        assert!(before.elapsed() >= Duration::from_millis(50));
        let FlushError::TimedOut {
            domain,
            device,
            busy,
            waited,
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((domain, device, busy), (D1, NIC, 1));
        assert!(waited >= Duration::from_millis(50));
        assert!(
            error.to_string().starts_with("flush of domain 1: after "),
            "{error}"
        );
        // Another domain does not wait for it.
        unit.invalidate_domain(D2).unwrap();

        // A detach gives up too; the device stays a member until a second one succeeds, and
        // flushes of the domain go on waiting for it.
        assert!(matches!(
            unit.detach(NIC),
            Err(UnitAttachError::TimedOut { busy: 1, .. })
        ));
        assert!(unit.invalidate_domain(D1).is_err());
        assert!(matches!(
            unit.attach(NIC, D1, ROOT),
            Err(UnitAttachError::AlreadyAttached { domain: D1, .. })
        ));
        gate.closed.store(false, Ordering::SeqCst);
        assert_eq!(access.join().unwrap(), Ok(()));
        unit.invalidate_domain(D1).unwrap();
        unit.detach(NIC).unwrap();
        unit.attach(NIC, D1, ROOT).unwrap();
    });
    assert_eq!(unit.flush_counters().waits, 2);
}

#[test]
fn a_port_that_panics_inside_does_not_block_flushes() {
    struct Broken;
    impl TargetMemory for Broken {
        fn with_cells(
            &self,
            _: Span<Pa>,
            _: &mut dyn FnMut(&[AtomicU64]),
        ) -> Result<(), BadTarget> {
            panic!("broken memory")
        }
    }
    let words = tables();
    words.set(0x3000, DATA | RW);
    let unit = SoftwareUnit::with_config(words, Broken, quick());
    unit.attach(NIC, D1, ROOT).unwrap();
    let mut port = unit.port(NIC);
    assert!(thread::scope(|s| s.spawn(|| port.read(0, &mut [0])).join()).is_err());
    unit.invalidate_domain(D1).unwrap();
    unit.detach(NIC).unwrap();
}

/// Tables in which something happens between a walk's read of one address and the walk going on.
struct Interrupted {
    words: Words,
    address: u64,
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl WalkMemory for Interrupted {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let word = self.words.read_u64(address);
        if address == self.address
            && let Some(then) = self.then.lock().unwrap().take()
        {
            then();
        }
        word
    }
}

#[test]
fn a_walk_that_a_flush_overtakes_keeps_nothing_of_what_it_found() {
    // The flush comes when the walk has read the root, the middle table, the leaf. The last is in
    // the IOTLB's set before anything is inserted there; so nothing stale may come after it.
    for address in [0x1000, 0x2000, 0x3000] {
        let words = tables();
        words.set(0x3000, DATA | RW);
        let then = Mutex::new(None);
        let memory = Arc::new(Interrupted {
            words: words.clone(),
            address,
            then,
        });
        // The flush cannot wait for the very access that it interrupts.
        let config = SoftwareConfig {
            flush_timeout: Duration::ZERO,
            ..SoftwareConfig::default()
        };
        let unit = SoftwareUnit::with_config(memory.clone(), data(8192), config);
        unit.attach(NIC, D1, ROOT).unwrap();
        let flusher = unit.clone();
        let stores = words.clone();
        *memory.then.lock().unwrap() = Some(Box::new(move || {
            // All tables but the root are replaced; the leaf leads elsewhere.
            stores.set(0x8000, 0x9000 | RW);
            stores.set(0x9000, (DATA + 0x1000) | RW);
            stores.set(0x1000, 0x8000 | RW);
            assert!(flusher.invalidate_ranges(D1, &page(0), 1, true).is_err());
        }));
        let mut port = unit.port(NIC);
        let mut word = [0];
        port.read(0, &mut word).unwrap();
        assert_eq!(
            word,
            [DATA],
            "the old tables were whole, and the flush waits for this access"
        );
        port.read(0, &mut word).unwrap();
        assert_eq!(word, [DATA + 0x1000], "{address:#x}");
        assert_eq!(port.counters().table_reads, 6);
        port.read(0, &mut word).unwrap();
        assert_eq!((word, port.counters().iotlb_hits), ([DATA + 0x1000], 1));
    }
}

#[test]
fn a_walk_during_the_cleaning_keeps_nothing() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    let mut port = unit.port(NIC);
    unit.shared.clock.clean(|| {
        for n in 1..3 {
            assert_eq!(read(&mut port, 0), Ok(DATA));
            assert_eq!(port.counters().table_reads, n * 3);
        }
    });
    assert_eq!(read(&mut port, 0), Ok(DATA));
    assert_eq!(port.counters().table_reads, 9);
    assert_eq!(read(&mut port, 0), Ok(DATA));
    assert_eq!(
        (port.counters().table_reads, port.counters().iotlb_hits),
        (9, 1)
    );
}
