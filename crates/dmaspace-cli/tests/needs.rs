//! Locked memory as `dmaspace inspect` foretells it, beside what address spaces of `ioas` foretell for the same guest.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::ops::RangeInclusive;
use std::sync::Arc;

use common::{dmaspace, report};
use ioas::{
    Entering, Forecast, Ioas, KernelError, Ledger, MapSource, Mapper, MapperInfo, Memory, Profile,
    Synthetic,
};
use iopt::Prot;
use runs::{Iova, Span};

const GIB: u64 = 1 << 30;

/// A container of type 1, or an address space of iommufd, of which nothing but the limit is asked.
struct Untouched<const IOMMUFD: bool>;

fn untouched<T>() -> Result<T, KernelError> {
    panic!("a forecast asks no kernel")
}

impl<const IOMMUFD: bool> Mapper for Untouched<IOMMUFD> {
    type Device = ();

    const PROFILE: Profile = match IOMMUFD {
        true => Profile::Iommufd,
        false => Profile::Type1,
    };

    fn enter(&mut self, (): &(), _: Entering) -> Result<(), KernelError> {
        untouched()
    }

    fn leave(&mut self, (): &()) -> Result<(), KernelError> {
        untouched()
    }

    fn info(&self) -> Result<MapperInfo, KernelError> {
        let ranges: Vec<RangeInclusive<u64>> = vec![0..=u64::MAX];
        Ok(MapperInfo {
            granule: 4096,
            ranges: Some(ranges),
            available: None,
            page_sizes: None,
        })
    }

    unsafe fn map(&mut self, _: Span<Iova>, _: MapSource<'_>, _: Prot) -> Result<(), KernelError> {
        untouched()
    }

    fn unmap(&mut self, _: Span<Iova>) -> Result<u64, KernelError> {
        untouched()
    }

    fn set_tracking(&mut self, _: bool) -> Result<(), KernelError> {
        untouched()
    }

    fn dirty(&mut self, _: Span<Iova>, _: u64, _: &mut [u64]) -> Result<(), KernelError> {
        untouched()
    }

    fn is_blind(&self) -> bool {
        false
    }

    fn give_up_addresses(&mut self) -> Result<(), KernelError> {
        untouched()
    }

    unsafe fn take_over(
        &mut self,
        _: &[Arc<()>],
        _: &[(Span<Iova>, MapSource<'_>)],
    ) -> Result<(), KernelError> {
        untouched()
    }
}

/// The sum that address spaces foretell, each of which maps all parts: bytes, and bytes of a page.
fn foretold(iommufd: bool, spaces: u64, parts: &[(u64, u64)]) -> u64 {
    let ledger = Ledger::new("mm->locked_vm", None, 0);
    let memory = |(bytes, page): &(u64, u64)| {
        let object = Synthetic::new([Span::new(1 << 40, *bytes)]).charged_by(*page);
        Memory::new(Arc::new(object), &ledger)
    };
    let memory: Vec<_> = parts.iter().map(memory).collect();
    let open = |_| match iommufd {
        true => Ioas::over_mapper(Untouched::<true>),
        false => Ioas::over_mapper(Untouched::<false>),
    };
    let spaces: Vec<Ioas> = (0..spaces).map(open).collect();
    let needed = spaces.iter().flat_map(|space| {
        let of = |memory: &Arc<Memory>| match space.forecast(memory, Span::new(0, memory.len())) {
            Forecast::Fits { needed } => needed,
            other => panic!("{other}"),
        };
        memory.iter().map(of).collect::<Vec<_>>()
    });
    needed.sum()
}

#[test]
fn inspect_and_address_spaces_foretell_the_same_sum() {
    let small = [(4 * GIB, 4096)];
    let pools = [(3 * GIB, 2 << 20), (GIB, GIB)];
    let objects = "-object memory-backend-memfd,id=a,size=3G,hugetlb=on,hugetlbsize=2M \
        -object memory-backend-memfd,id=b,size=1G,hugetlb=on,hugetlbsize=1G -numa node,memdev=a -numa node,memdev=b";
    let type1 = "-device vfio-pci,host=01:00.0 -device vfio-pci,host=02:00.0";
    let iommufd = "-object iommufd,id=i -device vfio-pci,host=01:00.0,iommufd=i -device vfio-pci,host=02:00.0,iommufd=i";
    for (memory, parts) in [("", &small[..]), (objects, &pools)] {
        for (devices, by_iommufd) in [(type1, false), (iommufd, true)] {
            for (viommu, spaces) in [("", 1), ("-device intel-iommu", 2)] {
                let line = format!("qemu-system-x86_64 -m 4G {memory} {devices} {viommu}");
                let found = report(dmaspace(&[
                    "inspect",
                    "--no-times",
                    "--json",
                    "--qemu",
                    &line,
                ]));
                let needed = found
                    .pointer("/needs/locked/needed_bytes")
                    .and_then(serde_json::Value::as_u64);
                assert_eq!(needed, Some(foretold(by_iommufd, spaces, parts)), "{line}");
                assert_eq!(needed, Some(spaces * 4 * GIB), "{line}");
            }
        }
    }
}
