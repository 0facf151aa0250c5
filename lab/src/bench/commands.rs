//! What commands of the program measure, as rows beside the lab's own. The lab knows no command: whoever runs
//! a [`Bench`](super::Bench) brings them.

use std::ops::ControlFlow;

use dmaspace::devices::Way;
use hostmem::Backing;

/// Commands of the program, as far as a bench takes their figures.
pub trait Commands {
    /// `dmaspace map` for a device of the machine. `on` is asked again and again; [`ControlFlow::Break`] ends it.
    ///
    /// # Errors
    ///
    /// [`NoTimes`]. Everything is given back then.
    fn map(
        &self,
        map: &DeviceMap<'_>,
        on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<MapTimes, NoTimes>;

    /// `dmaspace numa measure`: the times of walks by processors, and why there are none, or not all of them.
    fn walks(&self) -> (Vec<Walk>, Option<String>);
}

/// Memory to be mapped for a device by a back end of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMap<'a> {
    /// The device's address: `0000:00:05.0`.
    pub device: &'a str,
    /// By which interface.
    pub way: Way,
    /// What the memory consists of.
    pub backing: Backing,
    /// Its bytes.
    pub bytes: u64,
}

/// What a map took, and its unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapTimes {
    /// Nanoseconds of the map.
    pub map_ns: u64,
    /// Nanoseconds of the unmap.
    pub unmap_ns: u64,
}

/// Why nothing was timed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoTimes {
    /// Whoever was asked wants to stop.
    Interrupted,
    /// It cannot be done here: why, as a sentence.
    Because(String),
}

/// Walks by the processors of one node of tables on one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Walk {
    /// The node of the tables is that of the processors.
    pub near: bool,
    /// The median of a walk in nanoseconds.
    pub median_ns: f64,
}
