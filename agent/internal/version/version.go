// Package version identifies the build of this binary.
package version

// These are set at link time: -X …/agent/internal/version.version=v0.1.0 and -X
// …/agent/internal/version.commit=<hash>.
var (
	version = "devel"
	commit  = ""
)

// Version returns the release, for example `v0.1.0`, or `devel`.
func Version() string { return version }

// Commit returns the source revision, or "" if unknown.
func Commit() string { return commit }
