//! Faults of a unit, with the areas of the address space in which they happened.
//!
//! A program that drives a unit [drains](iommu::Unit::drain_faults) its records, at most as many as its log holds, and
//! asks the address spaces of its devices. [`Ioas::locate`] takes two looks at the areas and
//! copies what it names, so a flood of faults costs as much as the log is long, however many there were.

use core::fmt;

use iommu::Fault;
use runs::Bytes;

use crate::areas::area::Area;
use crate::space::Ioas;

/// A blocked access of a device of an address space, and where it went.
#[derive(Clone, Debug)]
pub struct SpaceFault {
    /// The unit's record: device, address, access and cause, as far as the unit has them.
    pub fault: Fault,
    /// The areas there, if the record's address is right: QEMU's AMD-Vi records none.
    pub place: FaultPlace,
}

/// The areas at the address of a fault.
#[derive(Clone, Debug)]
pub enum FaultPlace {
    /// The address is in an area, which does not allow the access, is taken out or released; or the unit has an
    /// older translation, or other tables.
    Area(Area),
    /// No area is there.
    Hole {
        /// The nearest area below.
        below: Option<Area>,
        /// The nearest area above.
        above: Option<Area>,
    },
}

impl Ioas {
    /// The areas at the address of `fault`. `None` when no device of that name is attached here: the fault belongs to
    /// another address space, or its device has none.
    ///
    /// ```
    /// use ioas::{Ioas, SoftwareIommu};
    /// use iommu::{DeviceId, Unit};
    ///
    /// let iommu = SoftwareIommu::new()?;
    /// let space = Ioas::over(&iommu)?;
    /// let device = DeviceId::pci(0, 5, 0);
    /// space.attach(iommu.device(device))?;
    /// assert!(iommu.port(device).read(0x1000, &mut [0]).is_err());
    /// iommu.unit().drain_faults(&mut |fault| {
    ///     let fault = space.locate(fault).map(|fault| fault.to_string());
    ///     assert!(fault.is_some_and(|text| text.ends_with("; nothing is mapped")));
    /// });
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn locate(&self, fault: Fault) -> Option<SpaceFault> {
        let core = self.gate.read();
        core.own_ref()?
            .devices()
            .find(|device| *device == fault.device)?;
        let areas = &self.state.lock().areas.0;
        let iova = fault.iova;
        let place = match areas.at(iova) {
            Some((_, area)) => FaultPlace::Area((**area).clone()),
            None => FaultPlace::Hole {
                below: areas.before(iova).map(|(_, area)| (**area).clone()),
                above: areas
                    .first_overlap(iova, u64::MAX)
                    .map(|(_, area)| (**area).clone()),
            },
        };
        Some(SpaceFault { fault, place })
    }
}

impl fmt::Display for SpaceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, place } = self;
        write!(f, "{fault}; ")?;
        let (below, above) = match place {
            FaultPlace::Area(area) => {
                write!(f, "in the area {}, {}", area.range(), area.prot())?;
                let out = [
                    (area.is_out(), "taken out"),
                    (area.is_released(), "released"),
                ];
                return out
                    .into_iter()
                    .filter(|(is, _)| *is)
                    .try_for_each(|(_, what)| write!(f, ", {what}"));
            }
            FaultPlace::Hole { below, above } => (below, above),
        };
        if below.is_none() && above.is_none() {
            return f.write_str("nothing is mapped");
        }
        if let Some(area) = below {
            let (range, distance) = (area.range(), fault.iova - area.range().last() - 1);
            match distance {
                0 => write!(f, "right behind the area {range}")?,
                _ => write!(f, "{} behind the area {range}", Bytes(distance))?,
            }
        }
        if below.is_some() && above.is_some() {
            f.write_str(", ")?;
        }
        if let Some(area) = above {
            let distance = area.range().start - fault.iova;
            write!(f, "{} before the area {}", Bytes(distance), area.range())?;
        }
        Ok(())
    }
}
