package hub

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Served returns a transport that distinguishes a missing object from a resource that the API
// server does not serve, for example while its CRD is being recreated or serves another version.
// The server responds with 404 in both cases, which clients interpret as a missing object. While a
// CRD is being deleted, the server responds with 403 to the creation of its objects, as if an
// admission policy refused them. In both cases of a resource that is not served, the status becomes
// 503, which is a failed request.
func Served(next http.RoundTripper) http.RoundTripper { return served{next} }

type served struct{ next http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (s served) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := s.next.RoundTrip(request)
	if err != nil {
		return response, err
	}
	_, namespaced := resourceOf(request.URL.Path)
	switch {
	// If the object does not exist, the API server responds with a Status.
	case response.StatusCode == http.StatusNotFound && namespaced && strings.HasPrefix(response.Header.Get("Content-Type"), "text/plain"):
		return unavailable(response, fmt.Sprintf("the API server does not serve %s: is its CRD installed, in this version?", request.URL.Path))
	case response.StatusCode == http.StatusForbidden && request.Method == http.MethodPost && namespaced:
		content, err := io.ReadAll(io.LimitReader(response.Body, statusSize))
		if err != nil {
			_ = response.Body.Close()
			return nil, fmt.Errorf("reading a response: %w", err)
		}
		if bytes.Contains(content, []byte(crdTerminates)) {
			return unavailable(response, fmt.Sprintf("the API server does not serve %s: its CRD is being deleted", request.URL.Path))
		}
		response.Body = replayed{io.MultiReader(bytes.NewReader(content), response.Body), response.Body}
	}
	return response, nil
}

const (
	// crdTerminates is in the Status with which kube-apiserver 1.36 responds to the creation of an
	// object whose CRD is being deleted.
	crdTerminates = "create not allowed while custom resource definition is terminating"
	// statusSize is how much of a Status is searched, in bytes.
	statusSize = 64 << 10
)

// replayed is a response body whose beginning has been read, and is read once more.
type replayed struct {
	io.Reader
	io.Closer
}

// unavailable returns a response with the status 503 in the place of another one.
func unavailable(response *http.Response, message string) (*http.Response, error) {
	_ = response.Body.Close() // its content is not needed
	status, err := json.Marshal(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable,
		Message: message,
	})
	if err != nil {
		return nil, fmt.Errorf("encoding a status: %w", err)
	}
	changed := *response
	changed.StatusCode, changed.Status = http.StatusServiceUnavailable, "503 "+http.StatusText(http.StatusServiceUnavailable)
	changed.Header = http.Header{"Content-Type": []string{"application/json"}}
	changed.Body, changed.ContentLength = io.NopCloser(bytes.NewReader(status)), int64(len(status))
	return &changed, nil
}
