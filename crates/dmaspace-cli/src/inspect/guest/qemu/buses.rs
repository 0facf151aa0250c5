//! Buses of a guest: which of its host's devices hang below an expander, and so have a memory node.
//!
//! Source: QEMU 10.0 `docs/pcie.txt`, `docs/pci_expander_bridge.txt`.

use std::collections::BTreeMap;

use super::super::{BusPlace, Guest};
use super::value::Pairs;

/// The most bridges and ports that are kept.
const MOST: usize = 4096;
/// Buses above one another, of which PCI numbers 256.
const DEEPEST: usize = 256;

/// Bridges, ports and expanders, and the buses that devices name.
#[derive(Debug, Default)]
pub(super) struct Buses {
    /// Name of a bridge or port, and the bus that it hangs on; an expander hangs on none.
    above: BTreeMap<String, Option<String>>,
    /// Devices of the host by their place in the guest's list, with the bus that they name.
    hanging: Vec<(usize, Option<String>)>,
}

impl Buses {
    /// Notes a device that makes a bus.
    pub(super) fn add(&mut self, driver: &str, pairs: &Pairs) {
        let (Some(id), true) = (pairs.get("id"), self.above.len() < MOST) else {
            return;
        };
        let bridge = driver.contains("port")
            || driver.contains("bridge")
            || matches!(driver, "x3130-upstream" | "xio3130-downstream");
        let above = match driver {
            "pxb-pcie" | "pxb" | "pxb-cxl" => None,
            _ if bridge => Some(pairs.get("bus").map_or("pcie.0", String::as_str).to_owned()),
            _ => return,
        };
        self.above.insert(id.clone(), above);
    }

    /// Notes that the `nth` device of the host hangs on `bus`.
    pub(super) fn hang(&mut self, nth: usize, bus: Option<String>) {
        self.hanging.push((nth, bus));
    }

    /// Fills in the places of the devices, once all buses are known.
    pub(super) fn place(&mut self, guest: &mut Guest) {
        for (nth, bus) in std::mem::take(&mut self.hanging) {
            let place = self.of(bus.as_deref());
            if let Some(device) = guest.devices.get_mut(nth) {
                device.place = place;
            }
        }
    }

    fn of(&self, bus: Option<&str>) -> BusPlace {
        let mut bus = bus.unwrap_or("pcie.0");
        for _ in 0..DEEPEST {
            // The bus of the port `rp1` is `rp1` or `rp1.0`.
            let own = bus.strip_suffix(".0");
            let above = self.above.get(bus);
            match above.or_else(|| self.above.get(own?)) {
                Some(None) => return BusPlace::Expander,
                Some(Some(above)) => bus = above,
                None if matches!(bus, "pcie.0" | "pci.0") => return BusPlace::Root,
                None => return BusPlace::Unknown,
            }
        }
        BusPlace::Unknown
    }
}
