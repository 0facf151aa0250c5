//! Device models: the interface between a device and the server.

use std::io;

use crate::error::RequestRefusal;

/// Regions of a PCI device (`VFIO_PCI_NUM_REGIONS`): six BARs, the ROM, the configuration space, VGA.
pub const REGIONS: usize = 9;
/// The configuration space among them (`VFIO_PCI_CONFIG_REGION_INDEX`).
pub const CONFIG_REGION: usize = 7;
/// Kinds of interrupts of a PCI device (`VFIO_PCI_NUM_IRQS`): INTx, MSI, MSI-X, error, request.
pub const IRQS: usize = 5;
/// INTx among them (`VFIO_PCI_INTX_IRQ_INDEX`): the one that can be masked, and masks itself when it is raised.
pub const INTX: usize = 0;
/// MSI-X among them (`VFIO_PCI_MSIX_IRQ_INDEX`).
pub const MSIX: usize = 2;

/// Description of a device, as the client asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Bytes of each region; 0 for one that is not there. All can be read and written, by messages only: none can be mapped
    /// by the client.
    pub regions: [u64; REGIONS],
    /// Number of interrupts of each kind.
    pub irqs: [u32; IRQS],
    /// The device has [`Migration`].
    pub migration: bool,
}

/// A device model. The server calls it from the thread that serves the client; its own threads use
/// [`ClientMemory`](crate::ClientMemory) and [`Irqs`](crate::Irqs) at any time.
///
/// While it is called, no other request is served. So it must not wait for the client.
pub trait DeviceModel {
    /// Reads from `region` at `offset`; all of `bytes` lies inside it.
    ///
    /// # Errors
    ///
    /// There is no such register. The client receives every refusal as an I/O error.
    fn read(&self, region: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes to `region` at `offset`; all of `bytes`, as many as the client's message has, lies inside it.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    fn write(&self, region: usize, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Resets the device. When this returns, nothing of before is under way.
    fn reset(&self);

    /// The client has left, for whatever reason. Its memory is unmapped and its interrupts are gone. The device's state stays
    /// as it is (specification, "Client Disconnection").
    fn left(&self) {}

    /// A request of the client was refused; `command` is its number.
    fn refused(&self, command: u16, refusal: &RequestRefusal) {
        let _ = (command, refusal);
    }

    /// Clients cannot be accepted: the process has no descriptor left, for instance. Once until one is, or until there is
    /// none; it is tried again ten times a second. Called while another client is served, too.
    fn not_accepted(&self, error: &io::Error) {
        let _ = error;
    }

    /// Migration of the device, if [`Description::migration`] says that it has it.
    fn migration(&self) -> Option<&dyn Migration> {
        None
    }
}

/// Stop, copy and resume.
pub trait Migration {
    /// Stops the device: when this returns, it does no DMA and raises no interrupt.
    fn stop(&self);

    /// Has it go on.
    fn resume(&self);

    /// The state of the device, which is stopped: at most [`MOST_STATE`] bytes.
    fn save(&self) -> Vec<u8>;

    /// Takes over a state of [`save`](Self::save). The device is stopped. The bytes come from the client.
    ///
    /// # Errors
    ///
    /// When they are none of this device. Its state is what it was.
    fn load(&self, state: &[u8]) -> io::Result<()>;
}

/// The longest state of a device, bytes.
pub const MOST_STATE: usize = 4 << 20;
