//! How much memory this machine has left.

/// Bytes that a process may take without pushing others out, the limit of its control group included; `None` where
/// the system does not say.
pub fn available_bytes() -> Option<u64> {
    let system = system()?;
    Some(group().map_or(system, |group| group.min(system)))
}

#[cfg(target_os = "linux")]
fn system() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(target_os = "linux")]
fn group() -> Option<u64> {
    let number = |name: &str| {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

/// All of the memory: macOS compresses and moves what is not used.
#[cfg(target_os = "macos")]
fn system() -> Option<u64> {
    let out = std::process::Command::new("/usr/sbin/sysctl").args(["-n", "hw.memsize"]).output().ok()?;
    String::from_utf8(out.stdout).ok()?.trim().parse().ok()
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn system() -> Option<u64> {
    None
}

#[cfg(not(target_os = "linux"))]
fn group() -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn some_memory_is_available() {
        assert!(super::available_bytes().is_some_and(|n| n > 1 << 20));
    }
}
