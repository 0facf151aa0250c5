//! QEMU's `-object`: memory, and technologies that keep it from the host.
//!
//! Source: QEMU 10.0 `qapi/qom.json`, `MemoryBackendProperties`.

use super::known::{BACKENDS, CONFIDENTIAL, NEUTRAL};
use super::value::{Pairs, bytes, has_variable, set};
use super::{EACH, ParsedOptions};
use crate::inspect::guest::{ConfigError, Ram, cpus, page};

impl ParsedOptions {
    /// Takes an object.
    pub(super) fn object(&mut self, mut pairs: Pairs, pool: u64) -> Result<(), ConfigError> {
        let kind = pairs.remove("qom-type").unwrap_or_default();
        self.libvirt |= pairs.get("id").is_some_and(|id| id == "masterKey0");
        if let Some((_, told)) = CONFIDENTIAL.iter().find(|(known, _)| *known == kind) {
            self.protection_object(told, pairs);
            return Ok(());
        }
        if has_variable(&kind) {
            self.guest.ignore(&format!("-object {kind}"));
        }
        let Some(backend) = kind.strip_prefix("memory-backend-") else {
            return Ok(());
        };
        let shared = match backend {
            "ram" | "file" => false,
            "memfd" | "shm" | "memfd-private" | "guest-memfd" => true,
            // Pages of SGX are not mapped for devices.
            "epc" => {
                let id = pairs.remove("id").unwrap_or_default();
                self.guest.ignore(&format!("memory object {id:?} ({kind})"));
                return Ok(());
            }
            _ => {
                return Err(ConfigError::Value {
                    of: "-object".into(),
                    value: kind,
                    known: BACKENDS,
                });
            }
        };
        self.memory_object(&kind, shared, pairs, pool)
    }

    /// A technology that keeps memory from the host.
    fn protection_object(&mut self, told: &'static str, mut pairs: Pairs) {
        let id = pairs.remove("id").unwrap_or_default();
        // Bit 2 of the policy encrypts registers too: AMD SEV API, `SEV_POLICY_ES`.
        let policy = pairs.remove("policy").unwrap_or_default();
        let policy = match policy.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => policy.parse().ok(),
        };
        let registers = told == "SEV" && policy.is_some_and(|policy| policy & 4 != 0);
        let told = if registers { "SEV-ES" } else { told };
        self.protections.push((id, told.into()));
    }

    /// Memory, `shared` unless its properties say otherwise.
    fn memory_object(
        &mut self,
        kind: &str,
        shared: bool,
        mut pairs: Pairs,
        pool: u64,
    ) -> Result<(), ConfigError> {
        let of = |name: &str| format!("-object {kind}, {name}");
        let told = pairs.contains_key("prealloc");
        let mut flag = |name: &str, default| match pairs.remove(name).as_deref() {
            None => Ok(default),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some("off" | "no" | "false" | "n") => Ok(false),
            Some(value) => Err(ConfigError::Value {
                of: of(name),
                value: value.into(),
                known: "on, off",
            }),
        };
        let (shared, huge) = (flag("share", shared)?, flag("hugetlb", false)?);
        let prealloc = flag("prealloc", false)?;
        let size = |value: Option<String>, name| match value {
            None => Ok(None),
            Some(value) => bytes(&of(name), &value).map(Some),
        };
        let bytes = size(pairs.remove("hugetlbsize"), "hugetlbsize")?;
        let pages = bytes.map(|bytes| page(of("hugetlbsize"), bytes));
        let pages = pages.transpose()?;
        let threads = match pairs.remove("prealloc-threads") {
            None => EACH,
            Some(value) => cpus(of("prealloc-threads"), &value)?,
        };
        let mut host_nodes: Vec<u32> = Vec::new();
        pairs.retain(|name, value| {
            let is_node = name.starts_with("host-nodes");
            host_nodes.extend(is_node.then(|| set(value)).into_iter().flatten());
            !is_node
        });
        host_nodes.sort_unstable();
        host_nodes.dedup();
        let modelled = ["id", "size", "mem-path"];
        let properties = pairs
            .iter()
            .filter(|(name, _)| !modelled.contains(&name.as_str()));
        let properties: Vec<_> = properties
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let ram = Ram {
            id: pairs.get("id").cloned().unwrap_or_default(),
            bytes: size(pairs.remove("size"), "size")?.unwrap_or_default(),
            pool_bytes: huge.then(|| pages.unwrap_or(pool)),
            shared,
            file: pairs.remove("mem-path"),
            asks_for_huge: Some(true),
            prealloc_threads: if prealloc { threads } else { 0 },
            threads_given: threads != EACH,
            bound: pairs.get("policy").is_some_and(|policy| policy == "bind"),
            host_nodes,
            properties,
            ..Ram::default()
        };
        if told && !prealloc {
            self.lazy.push(ram.id.clone());
        }
        let unknown = pairs
            .into_keys()
            .filter(|name| !NEUTRAL.contains(&name.as_str()));
        let named = unknown.map(|name| format!("{name} of {:?}", ram.id));
        self.guest.ignored.extend(named);
        self.objects.push(ram);
        Ok(())
    }
}
