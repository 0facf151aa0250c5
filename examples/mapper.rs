//! A kernel interface of another behind an address space: one type that implements `dmaspace::Mapper`.
//!
//! For authors whose devices are behind a vDPA parent or a hypervisor's paravirtual IOMMU, which takes map and unmap
//! requests. The one here prints them. Limit, undo, errors and balloon are those of every address space, and a
//! request is a run, however many pages it has.
//!
//!     cargo run -p dmaspace-examples --example mapper

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspace::ioas::{Entering, MapSource, MapperInfo, Profile};
use dmaspace::{GuestBalloon, Ioas, Iova, KernelError, Mapper, PageSizes, Prot, Span};
use vm_memory::{GuestAddress, GuestMemoryMmap};

const REGION: u64 = 2 << 20;
/// The smallest piece that is unmapped by itself: see `Ioas::options`.
const PIECE: u64 = 1 << 20;
const EEXIST: i32 = 17;
const EOPNOTSUPP: i32 = 95;

/// Requests that a hypervisor has taken: length and address in this process, by device address.
#[derive(Default)]
struct Hypervisor {
    mappings: BTreeMap<u64, (u64, u64)>,
}

/// A device of the hypervisor, by its number there.
struct Device(u32);

type Answer<T> = Result<T, KernelError>;

fn refuse<T>(operation: &'static str, errno: i32) -> Answer<T> {
    Err(KernelError::Refused { operation, errno })
}

impl Hypervisor {
    /// Mappings that overlap `range`.
    fn within(&self, range: Span<Iova>) -> Vec<u64> {
        let before = self.mappings.range(..=range.last());
        let overlap = before.filter(|(start, (len, _))| *start + len > range.start);
        overlap.map(|(start, _)| *start).collect()
    }
}

impl Mapper for Hypervisor {
    type Device = Device;

    /// Error numbers are read as those of VFIO's type 1.
    const PROFILE: Profile = Profile::Type1;

    fn enter(&mut self, device: &Device, _: Entering) -> Answer<()> {
        println!("  attach device {}", device.0);
        Ok(())
    }

    fn leave(&mut self, device: &Device) -> Answer<()> {
        println!("  detach device {}", device.0);
        Ok(())
    }

    fn info(&self) -> Answer<MapperInfo> {
        Ok(MapperInfo {
            granule: 4096,
            // 39 bits, without the window of message-signalled interrupts.
            ranges: Some(vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]),
            available: Some(64 - self.mappings.len() as u64),
            page_sizes: Some(PageSizes::from_bits(4096)),
        })
    }

    /// The address is passed on, and followed by the device alone: the caller promises that the memory stays.
    unsafe fn map(&mut self, iova: Span<Iova>, source: MapSource<'_>, prot: Prot) -> Answer<()> {
        let MapSource::Address(address) = source else {
            return Err(KernelError::NoSource);
        };
        if !self.within(iova).is_empty() {
            return refuse("map", EEXIST);
        }
        println!("  map   {iova} to {prot}");
        self.mappings.insert(iova.start, (iova.len, address));
        Ok(())
    }

    /// Called for whole mappings only.
    fn unmap(&mut self, iova: Span<Iova>) -> Answer<u64> {
        println!("  unmap {iova}");
        let gone = self.within(iova).into_iter();
        let gone = gone.filter_map(|start| self.mappings.remove(&start));
        Ok(gone.map(|(len, _)| len).sum())
    }

    // Without dirty tracking all that is mapped for writing counts as written, and nothing is handed over.
    fn set_tracking(&mut self, on: bool) -> Answer<()> {
        match on {
            true => refuse("track", EOPNOTSUPP),
            false => Ok(()),
        }
    }

    fn dirty(&mut self, _: Span<Iova>, _: u64, _: &mut [u64]) -> Answer<()> {
        refuse("dirty", EOPNOTSUPP)
    }

    fn is_blind(&self) -> bool {
        true
    }

    fn give_up_addresses(&mut self) -> Answer<()> {
        refuse("give up", EOPNOTSUPP)
    }

    unsafe fn take_over(
        &mut self,
        _: &[Arc<Device>],
        _: &[(Span<Iova>, MapSource<'_>)],
    ) -> Answer<()> {
        refuse("take over", EOPNOTSUPP)
    }
}

fn main() -> anyhow::Result<()> {
    let regions = [0, 4 << 30].map(|at| (GuestAddress(at), REGION as usize));
    let guest = GuestMemoryMmap::<()>::from_ranges(&regions)?;
    let space = Ioas::options().granule(PIECE);
    let space = Arc::new(space.over_mapper(Hypervisor::default())?);
    let device = Arc::new(Device(7));
    space.attach(device.clone())?;

    println!("guest memory, {} pages", 2 * REGION / 4096);
    let ram = space.map_guest(&guest, Prot::RW)?;
    if let Err(overlap) = space.map_guest(&guest, Prot::RW) {
        println!("a second time: {overlap}");
    }

    println!("the balloon takes a piece, and gives it back");
    let mut balloon = GuestBalloon::new(&guest, [&ram], [space.clone()])?;
    let piece = [Span::new(PIECE, PIECE)];
    let back = balloon.inflate(&piece, &mut |run, why| println!("  kept {run}: {why}"))?;
    println!("  the host has {back} bytes back");
    balloon.deflate(&piece, &mut |run, why| println!("  lacking {run}: {why}"))?;

    println!("memory is unplugged");
    space.unmap(Span::new(4 << 30, REGION))?;
    println!("power off");
    space.detach(&device)?;
    drop(balloon);
    Ok(Arc::into_inner(space).map_or(Ok(()), Ioas::close)?)
}
