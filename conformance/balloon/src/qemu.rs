//! The same guest as a machine of QEMU: several processors, PCI, sleep, and a balloon of QEMU's own.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use conformance::newer_qemu::{MACHINE, NewerQemu};
use conformance::qmp::Qmp;
use serde_json::{Value, json};

use crate::checks::{Balloon, MIB};
use crate::guest::{Attached, Guest, Parts};

/// QEMU as a guest of `mib` MiB, whose commands go over its standard input and output.
pub(crate) fn command(
    qemu: &NewerQemu,
    parts: &Parts,
    initramfs: &Path,
    mib: u32,
    balloon: Attached<'_>,
    log: &Path,
    words: &str,
) -> Command {
    let mut command = qemu.command();
    command.args(MACHINE).args(["-m", &format!("{mib}M")]);
    let huge = if parts.huge { "on" } else { "off" };
    let memory = format!("memory-backend-memfd,id=ram,size={mib}M,share=on,hugetlb={huge}");
    command.args(["-object", &memory, "-machine", "memory-backend=ram"]);
    match balloon {
        Attached::VhostUser(socket) => {
            let socket = format!("socket,id=socket,path={}", socket.display());
            let device =
                "vhost-user-test-device-pci,chardev=socket,virtio-id=5,num_vqs=5,config_size=24";
            command.args(["-chardev", &socket, "-device", device]);
        }
        Attached::Qemu { monitor, reporting } => {
            let monitor = format!("unix:{},server=on,wait=off", monitor.display());
            let reporting = if reporting { "on" } else { "off" };
            let device = "virtio-balloon-pci,id=balloon,deflate-on-oom=on,page-poison=on";
            let device = format!("{device},free-page-reporting={reporting}");
            command.args(["-qmp", &monitor, "-device", &device]);
        }
    }
    let words = format!("console=ttyS0 no_timer_check panic=-1 terminal=ttyS1 {words}");
    command
        .args(["-serial", &format!("file:{}", log.display())])
        .args(["-serial", "stdio", "-append", &words, "-kernel"])
        .arg(&parts.kernel)
        .arg("-initrd")
        .arg(initramfs);
    command
}

/// QEMU's balloon.
#[derive(Debug)]
pub struct OfQemu {
    monitor: Qmp,
    /// Bytes of the guest.
    memory: u64,
}

impl OfQemu {
    /// Boots a guest of `mib` MiB with it, with more `words` for the kernel. Its monitor is below `directory`.
    ///
    /// # Errors
    ///
    /// When it does not come up.
    pub fn boot(
        parts: &Parts,
        mib: u32,
        directory: &Path,
        reporting: bool,
        words: &[&str],
    ) -> anyhow::Result<(Guest, Self)> {
        let socket = directory.join("monitor");
        let monitor = &socket;
        let guest = Guest::boot(parts, mib, Attached::Qemu { monitor, reporting }, words)?;
        let monitor = Qmp::connect(&socket)?;
        let memory = u64::from(mib) * MIB;
        Ok((guest, Self { monitor, memory }))
    }

    /// A figure of the guest's statistics, once it has told one.
    ///
    /// # Errors
    ///
    /// When it tells none.
    pub fn statistic(&mut self, name: &str) -> anyhow::Result<u64> {
        const DEVICE: &str = "/machine/peripheral/balloon";
        let every = json!({"path": DEVICE, "property": "guest-stats-polling-interval", "value": 1});
        self.monitor.command("qom-set", every)?;
        let what = json!({"path": DEVICE, "property": "guest-stats"});
        let of = |said: &Value| said["stats"][name].as_u64();
        // All ones until there are some.
        let told = |said: &Value| of(said).is_some_and(|value| value != u64::MAX);
        let said = self.monitor.until("qom-get", &what, told)?;
        of(&said).context("no statistics")
    }
}

impl Balloon for OfQemu {
    fn set_target(&mut self, bytes: u64) -> anyhow::Result<()> {
        let left = json!({"value": self.memory - bytes});
        self.monitor.command("balloon", left).map(|_| ())
    }

    fn actual(&mut self) -> anyhow::Result<u64> {
        let said = self.monitor.command("query-balloon", json!({}))?;
        let left = said["actual"].as_u64();
        Ok(self.memory - left.context("QEMU does not tell")?)
    }
}
