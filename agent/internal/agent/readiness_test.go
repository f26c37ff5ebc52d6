package agent

import (
	"errors"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/assert"
)

func TestWhyTheAgentIsNotReadyIsLoggedOnce(t *testing.T) {
	var lines []string
	logger := funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})
	var err error
	check := logged(logger, func() error { return err })
	for _, err = range []error{nil, errors.New("first"), errors.New("first"), errors.New("second"), nil, nil} {
		assert.Equal(t, err, check(nil))
	}
	assert.Equal(t, []string{
		`"level"=0 "msg"="not ready" "reason"="first"`, `"level"=0 "msg"="not ready" "reason"="second"`, `"level"=0 "msg"="ready again"`,
	}, lines)
}
