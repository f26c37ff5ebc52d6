package operator

import "github.com/awslabs/operatorpkg/controller"

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

// IsNamed reports whether a controller has the name.
func IsNamed(c controller.Controller, name string) bool {
	named, is := c.(interface{ Name() string })
	return is && named.Name() == name
}
