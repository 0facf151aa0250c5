//! The software IOMMU: devices reach the memory of this process as it comes and goes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hostmem::{Backing, Mapping, Pinner};
use ioas::{HostMemory, Ioas, Ledger, Memory, SoftwareIommu, SoftwarePort};
use iommu::DeviceId;
use iopt::{Interruption, Prot};
use runs::Span;

use super::{MIB, alone};

const PAGE: u64 = 4096;
const FIRST: DeviceId = DeviceId::pci(0, 5, 0);
const SECOND: DeviceId = DeviceId::pci(0, 6, 0);

/// False, with a word, where too little may be locked.
fn room() -> bool {
    let room = Pinner::of_process().unwrap().room().unwrap();
    let enough = room.is_none_or(|room| room >= 8 * MIB);
    if !enough {
        eprintln!("SKIPPED: too little may be locked here");
    }
    enough
}

fn read(port: &mut SoftwarePort, iova: u64) -> Option<u64> {
    let mut word = [0];
    port.read(iova, &mut word).ok()?;
    Some(word[0])
}

#[test]
fn devices_reach_memory_as_it_comes_and_goes() {
    let _turn = alone();
    if !room() {
        return;
    }
    let iommu = SoftwareIommu::new().unwrap();
    let ledger = Ledger::new("a counter", Some(4 * MIB), 0);
    let space = Ioas::options().ledger(ledger.clone()).over(&iommu).unwrap();
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, 8 * PAGE, None).unwrap());
    let memory = Memory::new(Arc::new(HostMemory::new(mapping.clone())), &ledger);
    for (page, cells) in mapping.cells().chunks(512).enumerate() {
        cells[0].store(page as u64, Ordering::Relaxed);
    }
    // Noted only, until there is a device.
    let whole = Span::new(0, 8 * PAGE);
    space.map(MIB, &memory, whole, Prot::RW).unwrap();
    let mut port = iommu.port(FIRST);
    assert_eq!(read(&mut port, MIB), None);
    space.attach(iommu.device(FIRST)).unwrap();
    assert_eq!(read(&mut port, MIB + 3 * PAGE), Some(3));
    // The same memory at another place, and what the device writes is seen at both, and here.
    space.map(2 * MIB, &memory, whole, Prot::RW).unwrap();
    port.write(2 * MIB + 5 * PAGE, &[77]).unwrap();
    assert_eq!(read(&mut port, MIB + 5 * PAGE), Some(77));
    assert_eq!(mapping.cells()[5 * 512].load(Ordering::Relaxed), 77);
    // A hole in one of them.
    let hole = Span::new(MIB + 2 * PAGE, 2 * PAGE);
    space.unmap_cutting(hole, Interruption::Refused).unwrap();
    let found = [1, 2, 3, 4].map(|page| read(&mut port, MIB + page * PAGE));
    assert_eq!(found, [Some(1), None, None, Some(4)]);
    assert_eq!(read(&mut port, 2 * MIB + 3 * PAGE), Some(3));
    // Another address space of the same IOMMU has its areas for itself.
    let other = Ioas::options().ledger(ledger.clone()).over(&iommu).unwrap();
    other.attach(iommu.device(SECOND)).unwrap();
    other.map(MIB, &memory, whole, Prot::READ).unwrap();
    space.unmap_all().unwrap();
    assert_eq!(read(&mut port, 2 * MIB), None);
    let mut second = iommu.port(SECOND);
    assert_eq!(read(&mut second, MIB + 2 * PAGE), Some(2));
    assert!(second.write(MIB, &[1]).is_err());
    other.close().unwrap();
    space.close().unwrap();
    assert_eq!((ledger.in_use(), iommu.unit().tables().in_use()), (0, 0));
    // The IOMMU keeps no memory, whose physical addresses others have now.
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[cfg(feature = "vm-memory")]
#[test]
fn guest_memory_in_two_spaces_is_pinned_and_charged_once() {
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

    let _turn = alone();
    if !room() {
        return;
    }
    let iommu = SoftwareIommu::new().unwrap();
    let regions = [(GuestAddress(0), 4 << 20)];
    let guest = GuestMemoryMmap::<()>::from_ranges(&regions).unwrap();
    // Once, it fits.
    let ledger = Ledger::new("a counter", Some(6 * MIB), 0);
    let spaces = [FIRST, SECOND].map(|device| {
        let space = Ioas::options().ledger(ledger.clone()).over(&iommu).unwrap();
        space.attach(iommu.device(device)).unwrap();
        space
    });
    let first = spaces[0].map_guest(&guest, Prot::RW).unwrap();
    let charged = (ledger.in_use(), ledger.steps());
    let second = spaces[1].map_guest(&guest, Prot::RW).unwrap();
    assert_eq!((ledger.in_use(), ledger.steps()), charged);
    let memories = [&first, &second].map(|ram| ram.regions().next().unwrap().1.clone());
    assert!(Arc::ptr_eq(&memories[0], &memories[1]));
    guest.write_obj(42u64, GuestAddress(0x3000)).unwrap();
    let mut ports = [FIRST, SECOND].map(|device| iommu.port(device));
    for port in &mut ports {
        assert_eq!(read(port, 0x3000), Some(42));
    }
    // It stays for the other one.
    let [first, second] = spaces;
    first.close().unwrap();
    assert_eq!(ledger.in_use(), charged.0);
    assert_eq!(
        ports.each_mut().map(|port| read(port, 0x3000)),
        [None, Some(42)]
    );
    second.close().unwrap();
    assert_eq!(ledger.in_use(), 0);
    // Another account charges for itself.
    let own = Ioas::over(&iommu).unwrap();
    own.attach(iommu.device(FIRST)).unwrap();
    let ram = own.map_guest(&guest, Prot::RW).unwrap();
    assert!(!Arc::ptr_eq(ram.regions().next().unwrap().1, &memories[0]));
    own.close().unwrap();
}

#[cfg(all(feature = "vfio", feature = "iommufd"))]
#[test]
fn devices_that_are_not_there_are_refused_by_name() {
    use ioas::iommufd::Iommufd;
    use ioas::vfio::Group;

    let name = "ffff:ff:1f.7";
    let group = Group::of_device(name).unwrap_err();
    assert_eq!(group.to_string(), format!("{name} has no IOMMU group"));
    // Any file: the device is looked for first.
    let file = std::fs::File::open("/dev/null").unwrap();
    let iommufd = Iommufd::from_fd(file.into());
    let device = iommufd.device(name).unwrap_err().to_string();
    assert!(
        device.starts_with(&format!("{name} is not bound")),
        "{device}"
    );
    // An error says that it is no iommufd when it is asked for something.
    assert!(Ioas::over(&iommufd.clone()).is_err());
}
