//! Guest memory of vm-memory: a device and the virtual machine monitor see the same bytes.

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use hostmem::{Backing, GuestRegionError, Mapping, Pinner, PopulateError};
use ioas::{GuestRam, GuestRamError, Ledger, MapError, MemoryObject};
use iommu::{BadTarget, DeviceId, DomainId, SoftwareUnit, TargetMemory, Unit};
use iopt::Prot;
use runs::{Iova, Pa, Span};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, VolatileMemory,
};
use vmm_sys_util::tempfile::TempFile;

use super::{Ioas, MIB, alone, counted, runs_of, space};

const HIGH: u64 = 1 << 32;
const PAGE: u64 = 4096;
const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// A memory file, and whose part of it the guest has.
fn file(pages: u64) -> (Arc<File>, u64) {
    let mapping = Mapping::new(Backing::Memfd, pages * PAGE + 4 * MIB, None).unwrap();
    let file = mapping.fd().unwrap().try_clone_to_owned().unwrap();
    (Arc::new(File::from(file)), pages * PAGE)
}

/// 4 MiB from 0 on, anonymous; 4 MiB from 4 GiB on, of a file from its fourth page on.
fn guest() -> GuestMemoryMmap {
    let (file, at) = file(3);
    let ranges = [
        (GuestAddress(0), 4 << 20, None),
        (
            GuestAddress(HIGH),
            4 << 20,
            Some(FileOffset::from_arc(file, at)),
        ),
    ];
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

/// The guest's memory by physical address, as the pins have it.
struct Physical {
    guest: GuestMemoryMmap,
    /// Runs, with the guest address of each.
    runs: Mutex<Vec<(Span<Pa>, GuestAddress)>>,
}

impl Physical {
    fn learn(&self, space: &Ioas) {
        let mut runs = Vec::new();
        for area in space.areas() {
            let mut at = area.range().start;
            for run in runs_of(space, area.range()) {
                runs.push((run, GuestAddress(at)));
                at += run.len;
            }
        }
        *self.runs.lock().unwrap() = runs;
    }
}

impl TargetMemory for Physical {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let runs = self.runs.lock().unwrap().clone();
        for address in (span.start..=span.last()).step_by(8) {
            let found = runs.iter().find(|(run, _)| run.contains(address));
            let (run, guest) = found.ok_or(BadTarget { address })?;
            let at = GuestAddress(guest.0 + (address - run.start));
            let word = self.guest.get_slice(at, 8).unwrap();
            visit(std::slice::from_ref(word.get_atomic_ref(0).unwrap()));
        }
        Ok(())
    }
}

#[test]
fn devices_see_the_memory_of_the_guest_at_its_addresses() {
    let _turn = alone();
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    if pinner.room().unwrap().is_some_and(|room| room < 8 * MIB) {
        eprintln!("SKIPPED: too little may be locked here");
        return;
    }
    let guest = guest();
    let ledger = Ledger::new("a counter", None, 0);
    let ram = GuestRam::new(&guest, &ledger).unwrap();
    let (space, tables) = space();
    let before = counted(&pinner);
    space.map_guest_ram(&ram, Prot::RW).unwrap();
    let ranges: Vec<Span<Iova>> = space.areas().into_iter().map(|area| area.range()).collect();
    let expected = [Span::new(0, 4 * MIB), Span::new(HIGH, 4 * MIB)];
    assert_eq!(ranges, expected);
    assert_eq!(ledger.in_use(), 8 * MIB);
    assert!(counted(&pinner) >= before + 8 * MIB);

    let data = Arc::new(Physical {
        guest: guest.clone(),
        runs: Mutex::default(),
    });
    data.learn(&space);
    let unit = SoftwareUnit::new(tables.clone(), data);
    let root = space.with_table(|table| table.root()).unwrap();
    unit.attach(DEVICE, DomainId(1), root).unwrap();
    let mut port = unit.port(DEVICE);
    for at in [0, 4 * MIB - 8, HIGH, HIGH + PAGE, HIGH + 4 * MIB - 8] {
        guest.write_obj(at ^ 0x5555, GuestAddress(at)).unwrap();
        let mut word = [0];
        port.read(at, &mut word).unwrap();
        assert_eq!(word[0], at ^ 0x5555, "{at:#x}");
        port.write(at, &[at + 1]).unwrap();
        assert_eq!(guest.read_obj::<u64>(GuestAddress(at)).unwrap(), at + 1);
    }
    assert!(port.read(4 * MIB, &mut [0]).is_err());

    // The monitor lets go of its memory: devices still have it.
    drop(guest);
    let mut word = [0];
    port.read(HIGH + PAGE, &mut word).unwrap();
    assert_eq!(word[0], HIGH + PAGE + 1);
    unit.detach(DEVICE).unwrap();
    assert_eq!(space.unmap_all().unwrap().unpinned, 8 * MIB);
    assert_eq!((counted(&pinner), ledger.in_use()), (before, 0));
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn kernels_get_a_region_of_a_file_by_its_offset() {
    let (file, at) = file(5);
    let region = (
        GuestAddress(0),
        4 << 20,
        Some(FileOffset::from_arc(file.clone(), at)),
    );
    let guest = GuestMemoryMmap::<()>::from_ranges_with_files([region]).unwrap();
    let _pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    let ram = GuestRam::new(&guest, &Ledger::unlimited()).unwrap();
    let (base, memory) = ram.regions().next().unwrap();
    assert_eq!((base.0, memory.len()), (0, 4 * MIB));
    let object: &dyn MemoryObject = &**memory.object();
    let here = guest.get_host_address(GuestAddress(0)).unwrap() as u64;
    assert_eq!(object.in_process().unwrap().address(), here);
    #[cfg(feature = "iommufd")]
    {
        use std::os::unix::fs::MetadataExt;
        let (fd, offset) = object.file().unwrap();
        let told = File::from(fd.try_clone_to_owned().unwrap());
        let inode = |file: &File| file.metadata().unwrap().ino();
        assert_eq!((inode(&told), offset), (inode(&file), at));
    }
}

#[test]
fn pages_of_all_regions_are_brought_in_until_it_is_stopped() {
    let guest = guest();
    let _pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    let ram = GuestRam::new(&guest, &Ledger::unlimited()).unwrap();
    guest.write_obj(7u64, GuestAddress(HIGH)).unwrap();
    let mut told = Vec::new();
    let stopped = ram.populate(&mut |done| {
        told.push(done);
        ControlFlow::Break(())
    });
    assert!(
        matches!(stopped, Err(GuestRamError::Interrupted { done }) if done == 4 * MIB),
        "{stopped:?}"
    );
    ram.populate(&mut |done| {
        told.push(done);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(told, [4 * MIB, 4 * MIB, 8 * MIB]);
    assert_eq!(guest.read_obj::<u64>(GuestAddress(HIGH)).unwrap(), 7);
    // All of it is there.
    for region in guest.iter() {
        let mut there = vec![0u8; region.len() as usize / PAGE as usize];
        let start = region.get_mmap().as_ptr();
        // SAFETY: the region is mapped, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(start.cast(), region.size(), there.as_mut_ptr()) };
        assert_eq!(result, 0);
        assert!(there.iter().all(|page| page & 1 == 1));
    }
}

#[test]
fn the_region_whose_pages_cannot_be_brought_in_is_named() {
    let file = TempFile::new().unwrap().into_file();
    file.set_len(4 * MIB).unwrap();
    let file = Arc::new(file);
    let of_file = FileOffset::from_arc(file.clone(), 0);
    let ranges = [
        (GuestAddress(0), 4 << 20, None),
        (GuestAddress(HIGH), 4 << 20, Some(of_file)),
    ];
    let guest = GuestMemoryMmap::<()>::from_ranges_with_files(ranges).unwrap();
    let ram = GuestRam::new(&guest, &Ledger::unlimited()).unwrap();
    file.set_len(MIB).unwrap();
    let failed = ram.populate(&mut |_| ControlFlow::Continue(()));
    assert!(
        matches!(
            &failed,
            Err(GuestRamError::Populate { region, cause: PopulateError::Refused { offset: 0, .. } })
                if *region == Span::new(HIGH, 4 * MIB)
        ),
        "{failed:?}"
    );
}

#[test]
fn all_regions_are_mapped_or_none() {
    let _turn = alone();
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    if pinner.room().unwrap().is_some_and(|room| room < 8 * MIB) {
        eprintln!("SKIPPED: too little may be locked here");
        return;
    }
    let guest = guest();
    let (space, tables) = space();
    let before = counted(&pinner);
    // The limit holds the first region only.
    let ledger = Ledger::new("a counter", Some(6 * MIB), 0);
    let ram = GuestRam::new(&guest, &ledger).unwrap();
    let failed = space.map_guest_ram(&ram, Prot::RW).unwrap_err();
    let GuestRamError::Map { region, cause } = failed else {
        panic!("{failed}");
    };
    assert_eq!(region.start, HIGH);
    assert!(matches!(cause, MapError::OverLimit(_)), "{cause}");
    assert_eq!((space.len(), ledger.in_use()), (0, 0));
    assert_eq!((counted(&pinner), tables.in_use()), (before, 1));
    // Something is in the way of the second one: that is seen before anything is pinned.
    let ledger = Ledger::new("a counter", None, 0);
    let ram = GuestRam::new(&guest, &ledger).unwrap();
    let (_, low) = ram.regions().next().unwrap();
    let page = Span::new(0, PAGE);
    space.map(HIGH + PAGE, low, page, Prot::RW).unwrap();
    let steps = ledger.steps();
    let failed = space.map_guest_ram(&ram, Prot::RW).unwrap_err();
    let in_the_way = |cause: &MapError| matches!(cause, MapError::Overlap { .. });
    assert!(
        matches!(&failed, GuestRamError::Map { cause, .. } if in_the_way(cause)),
        "{failed}"
    );
    assert_eq!((space.len(), ledger.steps()), (1, steps));
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn regions_that_devices_cannot_have_are_refused_by_name() {
    let _pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    let refused = |region| {
        let region = GuestRegionMmap::new(region, GuestAddress(HIGH)).unwrap();
        let guest = GuestMemoryMmap::<()>::from_regions(vec![region]).unwrap();
        GuestRam::new(&guest, &Ledger::unlimited()).unwrap_err()
    };
    let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
    let build = |len, prot| {
        let builder = MmapRegionBuilder::new(len).with_mmap_prot(prot);
        builder.with_mmap_flags(flags).build().unwrap()
    };
    let read_only = refused(build(8192, libc::PROT_READ));
    assert!(
        matches!(
            read_only,
            GuestRamError::Mapping {
                region: Span { start: HIGH, .. },
                cause: GuestRegionError::Protection { .. },
            }
        ),
        "{read_only}"
    );
    let odd = refused(build(5000, libc::PROT_READ | libc::PROT_WRITE));
    assert!(
        matches!(
            odd,
            GuestRamError::Mapping {
                cause: GuestRegionError::Mapping(hostmem::MappingError::Unaligned {
                    len: 5000,
                    ..
                }),
                ..
            }
        ),
        "{odd}"
    );
}
