//! The machine that all options together make: its memory by objects, by nodes or by `-m`.

use super::{DEFAULT, EACH, ParsedOptions};
use crate::inspect::guest::{ConfigError, Guest, Monitor, Ram, Reading, Remapped};
use crate::size;

impl ParsedOptions {
    /// Makes these objects the guest's memory.
    pub(super) fn back(
        &mut self,
        ids: impl IntoIterator<Item = String>,
    ) -> Result<(), ConfigError> {
        for id in ids {
            let at = self.objects.iter().position(|ram| ram.id == id);
            let Some(mut ram) = at.map(|at| self.objects.remove(at)) else {
                self.guest
                    .or_named(self.reading, Err(ConfigError::NoObject { id }))?;
                continue;
            };
            if ram.bytes == 0 {
                ram.bytes = self.bytes.unwrap_or(DEFAULT);
            }
            let wanted = self.prealloc && !self.lazy.contains(&ram.id);
            if wanted && ram.prealloc_threads == 0 || ram.prealloc_threads == EACH {
                ram.prealloc_threads = self.guest.cpus.max(1);
            }
            // `-mem-prealloc` names them: `qemu_process_sugar_options`, `system/vl.c`.
            ram.threads_given |= self.prealloc;
            self.guest.memory.push(ram);
        }
        Ok(())
    }

    /// The guest, or the reason that there is none.
    pub(super) fn guest(mut self) -> Result<Guest, ConfigError> {
        self.guest.viommu = self.viommu.take();
        self.guest.confidential = self.confidential();
        let by_machine = self.machine.is_some();
        let machine = self.machine_objects();
        let by_nodes = !by_machine && !machine.is_empty();
        if machine.is_empty() {
            self.without_objects()?;
        }
        self.back(machine)?;
        let nodes = self.guest.bytes();
        // `numa_complete_configuration`, QEMU `hw/core/numa.c`.
        if let Some(bytes) = self.bytes.filter(|bytes| by_nodes && *bytes != nodes) {
            let (bytes, nodes) = (size::bytes(bytes), size::bytes(nodes));
            self.guest.ignore(&format!(
                "-m {bytes}, which is not the {nodes} of the nodes: QEMU refuses that"
            ));
        }
        let modules = std::mem::take(&mut self.modules);
        self.back(modules)?;
        for (object, mut blocks) in std::mem::take(&mut self.blocks) {
            let object = self.objects.iter().find(|ram| ram.id == object);
            blocks.bytes = object.map_or(0, |ram| ram.bytes);
            self.guest.blocks.push(blocks);
        }
        let unused = self
            .objects
            .iter()
            .map(|ram| format!("memory object {:?}", ram.id));
        self.guest.ignored.extend(unused);
        // Modules come behind what the machine begins with.
        let begins = self.bytes.unwrap_or_else(|| self.guest.bytes());
        let kind = self.kind.as_deref().unwrap_or("pc");
        self.guest.typed(kind);
        self.buses.place(&mut self.guest);
        self.guest.remapped = Remapped::of(kind, self.flash, begins, self.most_below_4g);
        self.guest.monitor = match self.libvirt && self.stopped {
            true => Monitor::Libvirt,
            false => Monitor::Qemu,
        };
        match self.reading {
            Reading::Exact => self.guest.in_range(),
            Reading::Rough => Ok(self.guest),
        }
    }

    /// The objects that are the memory that the machine begins with.
    fn machine_objects(&mut self) -> Vec<String> {
        match self.machine.take() {
            Some(id) => {
                // A file that is not read may define it; the machine has as much as `-m` says.
                if self.guest.elsewhere && !self.objects.iter().any(|ram| ram.id == id) {
                    self.guest
                        .ignore(&format!("memory object {id:?}, which may be in that file"));
                    self.objects.push(Ram {
                        id: id.clone(),
                        asks_for_huge: Some(true),
                        ..Ram::default()
                    });
                }
                vec![id]
            }
            None => std::mem::take(&mut self.nodes),
        }
    }

    /// Memory of a machine that names no object.
    fn without_objects(&mut self) -> Result<(), ConfigError> {
        let cpus = self.guest.cpus.max(1);
        let default = default_bytes(&self.program, self.kind.as_deref());
        if !self.unknown && self.bytes.unwrap_or(default) > 0 {
            // Options that are not here may say how much there is.
            if let (None, Some(variable), Reading::Exact) =
                (self.bytes, self.variable.take(), self.reading)
            {
                return Err(ConfigError::Elsewhere { variable });
            }
            self.guest.memory.push(Ram {
                bytes: self.bytes.unwrap_or(default),
                file: self.path.take(),
                asks_for_huge: Some(true),
                prealloc_threads: if self.prealloc { cpus } else { 0 },
                threads_given: self.prealloc,
                ..Ram::default()
            });
        }
        Ok(())
    }
}

/// Memory of a machine without `-m`: `default_ram_size` of QEMU 10.0 `hw/*/`, 128 MiB where it has none (`hw/core/machine.c`);
/// the boards of the Raspberry Pi have what their revision says.
fn default_bytes(program: &str, machine: Option<&str>) -> u64 {
    const MIB: u64 = 1 << 20;
    let target = program.rsplit('-').next().unwrap_or_default();
    let machine = machine.unwrap_or(match target {
        "ppc64" | "ppc64le" => "pseries",
        "loongarch64" => "loongarch",
        "hppa" => "hppa",
        _ => "",
    });
    let is = |names: &[&str]| {
        let mut names = names.iter();
        names.any(|name| machine == *name || machine.starts_with(&format!("{name}-")))
    };
    match target {
        _ if machine == "none" => 0,
        _ if is(&["raspi4b"]) => 2048 * MIB,
        _ if is(&[
            "sbsa-ref",
            "raspi2b",
            "raspi3b",
            "powernv",
            "powernv8",
            "powernv9",
            "powernv10",
        ]) =>
        {
            1024 * MIB
        }
        "loongarch64" => 1024 * MIB,
        _ if is(&["pseries", "raspi0", "raspi1ap", "raspi3ap"]) => 512 * MIB,
        "hppa" => 512 * MIB,
        _ => DEFAULT,
    }
}
