//! One address space, whatever it is over.

use std::sync::Arc;
use std::thread;

use ioas::{
    AttachError, DetachError, Endpoint, HandOverError, Ioas, KernelError, Ledger, Memory,
    MemoryObject, Profile, Synthetic,
};
use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit};
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

use crate::plain_kernel::{Device, Fake, PAGE, Plain, World};

const AT: u64 = 1 << 30;

/// An address space with an endpoint of its kind, and memory that it can map.
struct Case {
    space: Ioas,
    endpoint: Endpoint,
    memory: Arc<Memory>,
    ledger: Arc<Ledger>,
}

const BYTES: u64 = 64 * PAGE;

fn case(space: Ioas, endpoint: impl Into<Endpoint>, object: impl MemoryObject + 'static) -> Case {
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    Case {
        space,
        endpoint: endpoint.into(),
        memory: Memory::new(Arc::new(object), &ledger),
        ledger,
    }
}

fn kernel<const IOMMUFD: bool>() -> Case {
    let world = World::new(if IOMMUFD {
        Profile::Iommufd
    } else {
        Profile::Type1
    });
    let mapper = Plain::<IOMMUFD>::new(&world, &Arc::default());
    let (len, address, file) = (BYTES, Some(1 << 40), None);
    let space = Ioas::over_mapper(mapper);
    case(space, Arc::<Device>::default(), Fake { len, address, file })
}

/// Over tables of ours, a container of type 1, and an address space of iommufd: chosen by a value.
fn cases() -> [Case; 3] {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    let none = RunMap::<Vec<std::sync::atomic::AtomicU64>>::new([]).unwrap();
    let unit = Arc::new(SoftwareUnit::new(tables, none));
    let own = case(
        Ioas::over_table(DomainId(1), table),
        (unit, DeviceId::pci(0, 5, 0)),
        Synthetic::new([Span::new(1 << 32, BYTES)]),
    );
    [own, kernel::<false>(), kernel::<true>()]
}

#[test]
fn a_monitor_does_the_same_over_every_back_end() {
    for case in cases() {
        let Case {
            space,
            endpoint,
            memory,
            ledger,
        } = case;
        let id = endpoint.id();
        space.attach(endpoint).unwrap();
        assert_eq!(space.endpoints(), [id]);
        let whole = Span::new(0, BYTES);
        space.map(AT, &memory, whole, Prot::RW).unwrap();
        assert_eq!(ledger.in_use(), BYTES);
        assert_eq!(space.areas()[0].range(), Span::new(AT, BYTES));
        space.unmap(Span::new(AT, BYTES)).unwrap();
        assert_eq!((space.len(), ledger.in_use()), (0, 0));
        space.detach(id).unwrap();
        assert!(space.detach(id).is_err());
        space.close().unwrap();
    }
}

#[test]
fn an_endpoint_of_another_back_end_is_refused_by_name() {
    let [own, type1, iommufd] = cases();
    for (space, other) in [
        (&own.space, &type1.endpoint),
        (&type1.space, &own.endpoint),
        (&iommufd.space, &own.endpoint),
    ] {
        let backend = space.capabilities().backend;
        let refused = space.attach(other.clone()).unwrap_err();
        assert!(matches!(refused, AttachError::Endpoint { backend: named } if named == backend));
        assert!(space.endpoints().is_empty());
        let unknown = space.detach(other).unwrap_err();
        let named = matches!(
            unknown,
            DetachError::Unknown | DetachError::NotAttached { .. }
        );
        assert!(named, "{unknown}");
    }
    // Each is handed over in its own way.
    assert!(matches!(own.space.give_up(), Err(KernelError::NoSource)));
    let refused = type1.space.hand_over(&[]).unwrap_err();
    let backend = type1.space.capabilities().backend;
    assert_eq!(refused, HandOverError::Backend { backend });
}

/// Threads that map, look and unmap in windows of their own, with one endpoint coming and going.
#[test]
fn many_threads_use_one_address_space() {
    const THREADS: u64 = 4;
    for case in cases() {
        let Case {
            space,
            endpoint,
            memory,
            ledger,
        } = case;
        let pages = BYTES / PAGE / THREADS;
        space.attach(endpoint.clone()).unwrap();
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (space, memory) = (&space, &memory);
                scope.spawn(move || {
                    for round in 0..50 {
                        let first = thread * pages + round % pages;
                        // Not side by side: a kernel may map neighbours as one, which is not cut.
                        let (at, part) = (AT + 2 * first * PAGE, Span::new(first * PAGE, PAGE));
                        space.map(at, memory, part, Prot::RW).unwrap();
                        let area = space.area_at(at).unwrap();
                        assert_eq!((area.range().start, area.part()), (at, part));
                        let unmapped = space.unmap(Span::new(at, PAGE)).unwrap();
                        assert_eq!((unmapped.areas, unmapped.bytes), (1, PAGE));
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..20 {
                    space.detach(&endpoint).unwrap();
                    space.attach(endpoint.clone()).unwrap();
                }
            });
        });
        assert_eq!((space.len(), ledger.in_use()), (0, 0));
        space.close().unwrap();
    }
}
