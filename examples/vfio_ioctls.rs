//! A monitor that opens its devices by the crate `vfio-ioctls`, and maps through an address space.
//!
//! With the address of a device that is bound to `vfio-pci` it is given the guest's memory. Without one `VfioOps` is
//! implemented here, and prints what a container would be asked for.
//!
//!     cargo run -p dmaspace-examples --example vfio_ioctls -- 0000:01:00.0

use std::{path::PathBuf, sync::Arc};

use dmaspace::vfio::VfioOpsMapper;
use dmaspace::{Counter, Ioas, Limits, Prot, Span};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioOps};
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// The device has all of the guest's memory while `open` is open.
fn run<D: Send + Sync + 'static>(
    mapper: VfioOpsMapper<D>,
    open: impl FnOnce() -> anyhow::Result<D>,
) -> anyhow::Result<()> {
    let regions = [(GuestAddress(0), 1 << 20), (GuestAddress(4 << 30), 1 << 20)];
    let guest = GuestMemoryMmap::<()>::from_ranges(&regions)?;
    let space = Ioas::over_mapper(mapper);
    space.map_guest(&guest, Prot::RW)?; // Within the limit, all or nothing.
    let device = Arc::new(open()?);
    space.attach(device.clone())?; // Mapped now.
    let locked = Limits::in_use(Counter::MmLockedVm)?.known;
    println!("charged {}, locked {locked}", space.ledger()?.in_use());
    space.unmap(Span::new(4 << 30, 1 << 20))?;
    space.detach(&device)?; // Before the device is closed.
    Ok(space.close()?)
}

struct Printed;

impl VfioOps for Printed {
    unsafe fn vfio_dma_map(&self, iova: u64, size: usize, _: *mut u8) -> vfio_ioctls::Result<()> {
        println!("map {iova:#x}, {size:#x} bytes");
        Ok(())
    }

    fn vfio_dma_unmap(&self, iova: u64, size: usize) -> vfio_ioctls::Result<()> {
        println!("unmap {iova:#x}, {size:#x} bytes");
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let Some(address) = std::env::args().nth(1) else {
        return run(VfioOpsMapper::new(Arc::new(Printed)), || Ok(()));
    };
    let container = Arc::new(VfioContainer::new(None)?);
    let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}"));
    let mapper = VfioOpsMapper::of_container(&container)?;
    run(mapper, || Ok(VfioDevice::new(&path, container, false)?))
}
