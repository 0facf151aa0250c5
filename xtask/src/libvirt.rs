//! Guests that `dmaspace numa --emit libvirt` writes, against libvirt's own schema.

use std::{
    fs::{self, File},
    io::Write as _,
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    programs::Programs,
};

const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

/// Start of a domain, which a plan does not have.
const BEFORE: &str = "<domain type='kvm'><name>guest</name>\
    <os><type arch='x86_64' machine='q35'>hvm</type></os>\n";

/// Has the schema judge a guest for every machine in `examples/topologies`.
pub(crate) fn judge(repository: &Repository) -> anyhow::Result<()> {
    let kept = repository.metadata.target_directory.join("libvirt");
    fs::create_dir_all(&kept).with_context(|| format!("{kept} cannot be made"))?;
    let machines = repository.root.join("examples/topologies");
    let programs = Programs::build(repository)?;
    let mut found = 0;
    for machine in fs::read_dir(&machines).context("examples/topologies cannot be read")? {
        let machine = machine?.path();
        for options in [&[][..], &["--viommu", "--no-bind"]] {
            let mut plan = programs.command("dmaspace", repository);
            plan.args(["numa", "--memory", "8G", "--emit", "libvirt"]);
            plan.arg("--topology");
            let plan = plan.arg(&machine).args(options);
            let said = plan.output().context("the plan cannot be started")?;
            ensure!(
                said.status.success(),
                "{}: {}",
                machine.display(),
                String::from_utf8_lossy(&said.stderr)
            );
            let path = kept.join("guest.xml");
            let mut file = File::create(&path).with_context(|| format!("{path}"))?;
            file.write_all(&[BEFORE.as_bytes(), &said.stdout, b"</domain>\n"].concat())?;
            let mut lint = Command::new("xmllint");
            lint.args(["--noout", "--relaxng", SCHEMA, path.as_str()]);
            cargo::run(&mut lint).with_context(|| machine.display().to_string())?;
            found += 1;
        }
    }
    ensure!(found > 0, "there is no machine in examples/topologies");
    Ok(())
}
