//! A PCI device's configuration space.
//!
//! QEMU keeps the BARs, the command register's effects and the MSI-X table by itself, and passes on
//! what it does not know. So this is bytes, of which some can be written to.
//!
//! Source: PCI Local Bus Specification 3.0, 6.1 (header), 6.7 (capabilities), 6.8.2 (MSI-X).

/// Bytes of the space.
pub const BYTES: usize = 256;
/// Where the first capability lies.
const FIRST: usize = 0x40;

/// Bits of BAR registers: a memory BAR of 32 bits, not prefetchable, is all zeros.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; BYTES],
    writable: [u8; BYTES],
    /// Where the next capability goes, and where the pointer to it lies.
    next: usize,
    link: usize,
}

/// Which device it is.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The vendor.
    pub vendor: u16,
    /// The device.
    pub device: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// The vendor of the subsystem, and its number.
    pub subsystem: (u16, u16),
}

impl ConfigSpace {
    /// Without capabilities.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; BYTES],
            writable: [0; BYTES],
            next: FIRST,
            link: 0x34,
        };
        space.set(0x00, &identity.vendor.to_le_bytes());
        space.set(0x02, &identity.device.to_le_bytes());
        // Revision 1: virtio's modern devices have at least that (VIRTIO 1.3, 4.1.2.1).
        space.set(0x08, &(identity.class << 8 | 1).to_le_bytes());
        space.set(0x2c, &identity.subsystem.0.to_le_bytes());
        space.set(0x2e, &identity.subsystem.1.to_le_bytes());
        // Memory space and bus master.
        space.allow(0x04, &[0x06, 0x04]);
        // The interrupt line, of which the firmware takes note.
        space.allow(0x3c, &[0xff]);
        space
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Lets `mask` be written to at `at`.
    pub fn allow(&mut self, at: usize, mask: &[u8]) {
        if let Some(place) = self.writable.get_mut(at..at + mask.len()) {
            place.copy_from_slice(mask);
        }
    }

    /// Adds a capability: its number, and what stands behind the pointer to the next one.
    pub fn capability(&mut self, id: u8, body: &[u8]) {
        let at = self.next;
        self.set(self.link, &[at as u8]);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.link = at + 1;
        self.next = (at + 2 + body.len()).next_multiple_of(4);
        // There is a list.
        self.set(0x06, &[0x10]);
    }

    /// MSI-X with `vectors` vectors: table and pending bits in BAR `bar`.
    pub fn msix(&mut self, vectors: u16, bar: u8, pending: u32) {
        let mut body = Vec::new();
        body.extend_from_slice(&(vectors - 1).to_le_bytes());
        body.extend_from_slice(&u32::from(bar).to_le_bytes());
        body.extend_from_slice(&(pending | u32::from(bar)).to_le_bytes());
        let at = self.next;
        self.capability(0x11, &body);
        // Enable and mask.
        self.allow(at + 3, &[0xc0]);
    }

    /// INTA.
    pub fn interrupt_pin(&mut self) {
        self.set(0x3d, &[1]);
    }

    /// Reads from `offset` on.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.bytes.iter().skip(offset as usize);
        out.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }

    /// Writes what can be written to.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let places = self.bytes.iter_mut().zip(self.writable);
        let places = places.skip(offset as usize);
        for (byte, (place, writable)) in bytes.iter().zip(places) {
            *place = *place & !writable | byte & writable;
        }
    }
}
