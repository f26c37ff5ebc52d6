// Package panics keeps a bug that one object reveals from ending the process, with everything else
// that it does. controller-runtime does so for reconcilers.
package panics

import (
	"fmt"
	"runtime/debug"
)

// Confined calls do, and turns a panic into an error.
func Confined(do func() error) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("an internal error of the shim, please report it: panic: %v, at %s", value, debug.Stack())
		}
	}()
	return do()
}
