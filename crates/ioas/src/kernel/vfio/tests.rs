//! Tests that need no kernel with VFIO.

use core::ops::RangeInclusive;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::string::ToString;
use std::vec;
use std::vec::Vec;

use iopt::Prot;
use proptest::prelude::*;
use runs::{PageSizes, Span};

use super::container::map_flags;
use super::device::all_available;
use super::info::{self, DeviceRegion, DeviceRegionKind, IommuInfo, MigrationInfo};
use super::{AnswerError, Container, DeviceRegisters, KernelError, VfioDevice, irq, sys};
use crate::kernel::sys::check_bitmap;

/// An answer: a fixed part of `fixed` bytes whose `u32` at `link` leads to the chain.
fn answer(fixed: &[u8], link: usize, capabilities: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = fixed.to_vec();
    let mut link = link;
    for (id, body) in capabilities {
        let at = bytes.len() as u32;
        bytes[link..link + 4].copy_from_slice(&at.to_ne_bytes());
        bytes.extend(id.to_ne_bytes());
        bytes.extend(1_u16.to_ne_bytes());
        link = bytes.len();
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(body);
    }
    bytes
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

/// `struct vfio_iommu_type1_info` with page sizes and a chain, which begins at byte 16.
fn iommu(sizes: u64, capabilities: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let fixed = [halves(&[24, 3]), words(&[sizes]), halves(&[0, 0])].concat();
    answer(&fixed, 16, capabilities)
}

fn ranges(ranges: &[RangeInclusive<u64>]) -> (u16, Vec<u8>) {
    let pairs: Vec<u64> = ranges
        .iter()
        .flat_map(|range| [*range.start(), *range.end()])
        .collect();
    (
        1,
        [halves(&[ranges.len() as u32, 0]), words(&pairs)].concat(),
    )
}

#[test]
fn an_iommu_reports_ranges_dirty_tracking_and_free_mappings() {
    let windows = vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1, 0..=u64::MAX];
    let chain = [
        (9, vec![1, 2, 3, 4]),
        ranges(&windows),
        (2, [halves(&[0, 0]), words(&[0x1000, 256 << 20])].concat()),
        (3, halves(&[65535])),
    ];
    let expected = IommuInfo {
        page_sizes: Some(PageSizes::from_bits(0x4020_1000)),
        iova_ranges: Some(windows),
        migration: Some(MigrationInfo {
            page_sizes: PageSizes::from_bits(0x1000),
            max_bitmap: 256 << 20,
        }),
        mappings_available: Some(65535),
    };
    assert_eq!(info::iommu(&iommu(0x4020_1000, &chain)), Ok(expected));
    // Without flags nothing is believed.
    assert_eq!(info::iommu(&[0; 24]), Ok(IommuInfo::default()));
}

/// `struct vfio_region_info` of BAR 0, which begins its chain at byte 12.
fn region(flags: u32, capabilities: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let fixed = [halves(&[32, flags, 0, 0]), words(&[0x4000, 0x100_0000])].concat();
    answer(&fixed, 12, capabilities)
}

#[test]
fn a_region_reports_what_of_it_can_be_mapped() {
    let chain = [
        (
            1,
            [halves(&[2, 0]), words(&[0, 0x1000, 0x3000, 0x1000])].concat(),
        ),
        (2, halves(&[0x8000_8086, 1])),
        (3, Vec::new()),
    ];
    let expected = DeviceRegion {
        index: 0,
        len: 0x4000,
        readable: true,
        writable: true,
        can_map: true,
        mappable: Some(vec![Span::new(0, 0x1000), Span::new(0x3000, 0x1000)]),
        msix_mappable: true,
        kind: Some(DeviceRegionKind {
            kind: 0x8000_8086,
            subtype: 1,
        }),
        offset: 0x100_0000,
    };
    assert_eq!(info::region(&region(15, &chain)), Ok(expected));
}

#[test]
fn a_number_of_ranges_that_is_not_there_is_not_believed() {
    let lie = [halves(&[u32::MAX, 0]), words(&[0, 1])].concat();
    let error = info::iommu(&iommu(0, &[(1, lie)])).unwrap_err();
    assert!(matches!(error, AnswerError::Truncated { .. }), "{error}");
}

#[test]
fn a_chain_that_leads_back_is_a_loop() {
    let mut bytes = iommu(0, &[(9, Vec::new()), (8, Vec::new())]);
    let first = bytes[16..20].to_vec();
    bytes[36..40].copy_from_slice(&first);
    assert_eq!(info::iommu(&bytes), Err(AnswerError::Loop));
}

/// Follows the links by itself: `None` when they lead outside or back.
fn chain_ends(bytes: &[u8], link: usize) -> Option<()> {
    let mut seen = BTreeSet::new();
    let mut link = link;
    loop {
        let next = u32::from_ne_bytes(bytes.get(link..link + 4)?.try_into().ok()?) as usize;
        if next == 0 {
            return Some(());
        }
        if !seen.insert(next) {
            return None;
        }
        link = next + 4;
    }
}

/// A kernel whose answers want the next of these lengths each time, and which refuses nothing.
fn grown(lengths: &[u32]) -> (Result<Vec<u8>, KernelError>, usize) {
    let mut asked = 0;
    let answer = sys::grow("ASK", &[0, 0, 0, 0, 7, 7, 7, 7], |answer| {
        let size = u32::from_ne_bytes(*answer.first_chunk().unwrap());
        assert_eq!((size as usize, answer[4]), (answer.len(), 7));
        let wanted = lengths.get(asked).or(lengths.last()).copied().unwrap_or(0);
        answer[..4].copy_from_slice(&wanted.to_ne_bytes());
        asked += 1;
        Ok(0)
    });
    (answer, asked)
}

#[test]
fn a_buffer_grows_until_the_answer_fits() {
    for (lengths, len, calls) in [(&[8][..], 8, 1), (&[40, 40], 40, 2), (&[40, 64, 24], 64, 3)] {
        let (answer, asked) = grown(lengths);
        assert_eq!((answer.unwrap().len(), asked), (len, calls));
    }
    let growing: Vec<u32> = (2..100).map(|n| n * 8).collect();
    for lengths in [&growing[..], &[u32::MAX]] {
        let (answer, asked) = grown(lengths);
        assert!(matches!(
            answer,
            Err(KernelError::Answer {
                problem: AnswerError::Endless { .. },
                ..
            })
        ));
        assert!(asked <= 8);
    }
}

proptest! {
    #[test]
    fn a_chain_is_read_as_it_was_written(
        windows in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20),
        avail in any::<u32>(),
        unknown in prop::collection::vec((4_u16.., prop::collection::vec(any::<u8>(), 0..9)), 0..5),
        first in any::<bool>(),
    ) {
        // The bytes of unknown capabilities leave the next ones at odd offsets.
        let windows: Vec<_> = windows.into_iter().map(|(first, last)| first..=last).collect();
        let known = [ranges(&windows), (3, halves(&[avail]))];
        let chain = if first { [&known[..], &unknown].concat() } else { [&unknown, &known[..]].concat() };
        let found = info::iommu(&iommu(0x1000, &chain)).unwrap();
        prop_assert_eq!(found.iova_ranges, Some(windows));
        prop_assert_eq!(found.mappings_available, Some(avail));
    }

    #[test]
    fn a_chain_that_does_not_end_is_refused(
        mut bytes in prop::collection::vec(0_u8..64, 24..200),
        known in any::<bool>(),
    ) {
        bytes[4..8].copy_from_slice(&15_u32.to_ne_bytes());
        if !known {
            // Small numbers, so that links lead somewhere.
            for at in (8..bytes.len() - 3).step_by(4) {
                let small = u32::from(bytes[at]) * 2;
                bytes[at..at + 4].copy_from_slice(&small.to_ne_bytes());
            }
        }
        let found = info::iommu(&bytes);
        if chain_ends(&bytes, 16).is_none() {
            prop_assert!(found.is_err());
        }
        let found = info::region(&bytes);
        if chain_ends(&bytes, 12).is_none() {
            prop_assert!(found.is_err());
        }
    }

    #[test]
    fn no_bytes_are_too_much(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = info::iommu(&bytes);
        let _ = info::region(&bytes);
    }

    #[test]
    fn a_bitmap_is_long_enough_when_the_last_page_has_its_bit(
        start in any::<u64>(), len in 0_u64..1 << 40, shift in 0_u32..40, words in 0_usize..100,
    ) {
        let (range, page) = (Span::new(start, len), 1 << shift);
        let pages = len.div_ceil(page);
        let fits = len > 0 && pages <= words as u64 * 64;
        prop_assert_eq!(check_bitmap(range, page, words).is_ok(), fits);
        prop_assert!(check_bitmap(range, page + 2, usize::MAX).is_err() || page <= 2);
    }
}

/// A file that stands in for a device's: region 0 is 8 KiB at 4 KiB.
fn device() -> (VfioDevice, DeviceRegion, File) {
    let file = empty_file(0x3000);
    let other = file.try_clone().unwrap();
    let region = DeviceRegion {
        len: 0x2000,
        readable: true,
        writable: true,
        can_map: true,
        offset: 0x1000,
        ..DeviceRegion::default()
    };
    (VfioDevice::from_fd(OwnedFd::from(file)), region, other)
}

/// A file that has no name any more.
fn empty_file(len: u64) -> File {
    let path = std::env::temp_dir().join(std::format!(
        "dmaspace-device-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(len).unwrap();
    file
}

#[test]
fn registers_are_little_endian_both_ways() {
    let (device, region, file) = device();
    let registers = device.map(&region, Span::new(0x1000, 0x1000)).unwrap();
    registers.write(8, 0x1122_3344_5566_7788_u64).unwrap();
    assert_eq!(device.read::<u32>(&region, 0x1008).unwrap(), 0x5566_7788);
    device.write(&region, 0x100c, 0xaabb_u16).unwrap();
    assert_eq!(registers.read::<u8>(12).unwrap(), 0xbb);
    assert_eq!(registers.read::<u16>(12).unwrap(), 0xaabb);
    assert_eq!(registers.read::<u64>(8).unwrap(), 0x1122_aabb_5566_7788);
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 0x2008).unwrap();
    assert_eq!(bytes, [0x88, 0x77, 0x66, 0x55, 0xbb, 0xaa, 0x22, 0x11]);
}

#[test]
fn registers_outside_or_unaligned_are_refused() {
    let (device, region, _file) = device();
    let registers = device.map(&region, Span::new(0, 0x1000)).unwrap();
    assert_eq!(registers.len(), 0x1000);
    registers.read::<u64>(0xff8).unwrap();
    for offset in [0x1000, u64::MAX - 7] {
        let (mapped, filed) = (
            registers.read::<u64>(offset),
            device.read::<u64>(&region, offset),
        );
        assert!(matches!(mapped, Err(KernelError::Outside { .. })));
        assert_eq!(filed.is_ok(), offset == 0x1000);
    }
    for offset in [1, 0xffe] {
        let error = registers.write(offset, 0_u32).unwrap_err();
        assert!(matches!(error, KernelError::Unaligned { size: 4, .. }));
    }
    let error = device.write(&region, 0x2000, 0_u8).unwrap_err();
    assert_eq!(
        error.to_string(),
        "0x2000+0x1 lies outside of a region of 0x2000 bytes"
    );
    // A region that lies about where it is.
    let far = DeviceRegion {
        offset: u64::MAX,
        ..region
    };
    assert!(device.read::<u64>(&far, 8).is_err());
    assert!(device.map(&far, Span::new(0x1000, 0x1000)).is_err());
}

#[test]
fn only_what_can_be_mapped_is_mapped() {
    let (device, mut region, _file) = device();
    let page = Span::new(0x1000, 0x1000);
    assert!(matches!(
        device.map(&region, Span::new(0x1000, 0x2000)),
        Err(KernelError::Outside { len: 0x2000, .. })
    ));
    region.mappable = Some(vec![Span::new(0, 0x1000)]);
    assert!(matches!(
        device.map(&region, page),
        Err(KernelError::NotMappable { region: 0, .. })
    ));
    region.mappable = Some(vec![Span::new(0, 0x1000), page]);
    device.map(&region, page).unwrap();
    region.can_map = false;
    assert!(device.map(&region, page).is_err());
}

#[test]
fn what_is_no_container_is_refused_by_name() {
    let file = empty_file(4096);
    let error = Container::from_fd(OwnedFd::from(file)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("VFIO_GET_API_VERSION was refused: "),
        "{error}"
    );
    let Err(error) = DeviceRegisters::map(
        &File::open("/dev/null").unwrap(),
        Span::new(0, 4096),
        true,
        false,
    ) else {
        panic!("/dev/null cannot be mapped");
    };
    assert!(matches!(
        error,
        KernelError::Refused {
            operation: "mmap",
            ..
        }
    ));
}

#[test]
fn permissions_that_the_kernel_does_not_know_are_named() {
    assert_eq!(map_flags(Prot::READ).unwrap(), 1);
    assert_eq!(map_flags(Prot::RW).unwrap(), 3);
    let error = map_flags(Prot::RW | Prot::EXECUTE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the kernel maps for reading and writing, not for \"rwx\""
    );
}

#[test]
fn a_refusal_of_irqs_names_them_and_how_many_there_are() {
    // No device, so it has no interrupts.
    let (device, _, file) = device();
    let triggers = [Some(file.as_fd()), None];
    let first = "1 interrupts from 0 on of index 0";
    for (refused, named) in [
        (
            device.set_irq_triggers(irq::MSIX, 3, &triggers),
            "2 interrupts from 3 on of index 2",
        ),
        (
            device.set_irq_triggers(irq::MSI, u32::MAX, &triggers),
            "2 interrupts from 4294967295 on of index 1",
        ),
        (device.mask_irq(irq::INTX), first),
        (device.unmask_irq(irq::INTX), first),
        (
            device.disable_irqs(irq::REQUEST),
            "0 interrupts from 0 on of index 4",
        ),
    ] {
        let error = refused.unwrap_err();
        let KernelError::Interrupts { errno, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(errno, libc::ENOTTY);
        let why = io::Error::from_raw_os_error(errno);
        assert_eq!(
            error.to_string(),
            std::format!("VFIO_DEVICE_SET_IRQS was refused for {named}, which has 0: {why}")
        );
    }
}

#[test]
fn fewer_irqs_than_wanted_are_no_success() {
    all_available(irq::MSI, 4, 0).unwrap();
    let error = all_available(irq::MSI, 4, 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "4 interrupts of index 1 are wanted, and the kernel has 1 for the device"
    );
}
