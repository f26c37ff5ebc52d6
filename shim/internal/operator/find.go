package operator

import (
	"slices"

	"github.com/awslabs/operatorpkg/controller"
)

// Find returns the controller with the name, if there is one and it is a T.
func Find[T any](controllers []controller.Controller, name string) (found T, is bool) {
	for _, each := range controllers {
		if IsNamed(each, name) {
			found, is = each.(T)
			return found, is
		}
	}
	return found, false
}

// Wrap returns the controllers with the one of that name replaced by what wrap makes of it, if
// there is one and it is a T.
func Wrap[T any](controllers []controller.Controller, name string, wrap func(T) controller.Controller) (wrapped []controller.Controller, is bool) {
	found, is := Find[T](controllers, name)
	if !is {
		return nil, false
	}
	wrapped = slices.Clone(controllers)
	wrapped[slices.IndexFunc(wrapped, func(c controller.Controller) bool { return IsNamed(c, name) })] = wrap(found)
	return wrapped, true
}

// IsNamed reports whether a controller has the name.
func IsNamed(c controller.Controller, name string) bool {
	named, is := c.(interface{ Name() string })
	return is && named.Name() == name
}
