package faults

import (
	"net/http"
	"strings"
)

// Request is a request to an API server.
type Request struct {
	// Verb is the RBAC verb: get, list, watch, create, update, patch, delete or deletecollection.
	// Empty for non-resource requests.
	Verb string
	// Group is empty for the core group.
	Group, Resource, Subresource, Namespace, Name string
	// Body is the body of a write.
	Body []byte
	// Class is the class of a write; see [Memory.Classify].
	Class Class
}

// Write reports whether the request may change something.
func (r *Request) Write() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	}
	return false
}

// parse determines verb and object from the URL, as the API server does.
func parse(r *http.Request) *Request {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	var q Request
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		q.Group, parts = parts[1], parts[3:]
	default:
		return &q
	}
	if len(parts) >= 3 && parts[0] == "namespaces" {
		q.Namespace, parts = parts[1], parts[2:]
	}
	q.Resource = parts[0]
	if len(parts) > 1 {
		q.Name = parts[1]
	}
	if len(parts) > 2 {
		q.Subresource = parts[2]
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		watch := r.URL.Query().Get("watch")
		switch {
		case watch == "1" || watch == "true":
			q.Verb = "watch"
		case q.Name == "":
			q.Verb = "list"
		default:
			q.Verb = "get"
		}
	case http.MethodPost:
		q.Verb = "create"
	case http.MethodPut:
		q.Verb = "update"
	case http.MethodPatch:
		q.Verb = "patch"
	case http.MethodDelete:
		q.Verb = "delete"
		if q.Name == "" {
			q.Verb = "deletecollection"
		}
	}
	return &q
}
