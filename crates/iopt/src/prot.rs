//! Permissions of a device for a page.

bitflags::bitflags! {
    /// Permissions of a device for a page, and properties of its accesses.
    ///
    /// A format refuses what it cannot express; it never grants more than was asked for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Prot: u32 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 1 << 1;
        /// The device may fetch instructions. Without it the page is marked as not executable
        /// where the format can say so; a format without a bit for it refuses this permission.
        const EXECUTE = 1 << 2;
        /// Only privileged requests are allowed (a PASID with the privileged-mode bit).
        const PRIVILEGED = 1 << 3;
        /// Accesses are cache-coherent whatever the device asks for: a "no snoop" request is
        /// snooped all the same.
        const COHERENT = 1 << 4;
        /// The page is a device's registers, not memory: accesses are neither cached nor merged
        /// nor reordered, where the format holds memory types.
        const DEVICE = 1 << 5;
        /// The page is memory, but accesses are not cached, whatever the memory's own attributes.
        const UNCACHED = 1 << 6;

        /// Read and write.
        const RW = Self::READ.bits() | Self::WRITE.bits();
    }
}

impl core::fmt::Display for Prot {
    /// `rw-`, `r-x pc`, `rw- d`: read, write, execute; privileged, coherent, device, uncached.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (flag, letter) in [(Prot::READ, "r"), (Prot::WRITE, "w"), (Prot::EXECUTE, "x")] {
            f.write_str(if self.contains(flag) { letter } else { "-" })?;
        }
        if self.intersects(Prot::PRIVILEGED | Prot::COHERENT | Prot::DEVICE | Prot::UNCACHED) {
            f.write_str(" ")?;
        }
        for (flag, letter) in [
            (Prot::PRIVILEGED, "p"),
            (Prot::COHERENT, "c"),
            (Prot::DEVICE, "d"),
            (Prot::UNCACHED, "u"),
        ] {
            f.write_str(if self.contains(flag) { letter } else { "" })?;
        }
        Ok(())
    }
}
