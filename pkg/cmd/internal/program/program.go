// Package program is shared by the commands of this module: their version, and settings from the
// environment.
package program

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/pflag"
)

// version is set at link time: -X …/pkg/cmd/internal/program.version=v0.1.0.
var version = "devel"

// Version returns the release, for example `v0.1.0`. Without one, it is the version of the module
// that was built, or `devel`.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "devel" && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return version
}

// FromEnvironment sets each flag that was not given from its environment variable. The variable's
// name is the prefix, followed by the flag's name in upper case with underscores. The error names
// every variable with an invalid value.
func FromEnvironment(flags *pflag.FlagSet, prefix string) error {
	var errs []error
	flags.VisitAll(func(flag *pflag.Flag) {
		name := prefix + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
		value, present := os.LookupEnv(name)
		if flag.Changed || !present {
			return
		}
		if err := flags.Set(flag.Name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s=%q: %w", name, value, err))
		}
	})
	return errors.Join(errs...)
}
